"""Batches that are sampled ahead of training: their order, their age, pauses, errors and the end."""

import threading
import time
from types import SimpleNamespace

import pytest

from grpo_megatron.monitoring.phases import Phases
from grpo_megatron.rollout.ahead import SampledAhead
from grpo_megatron.rollout.pipeline import RolloutPipeline
from grpo_megatron.rollout.source import Rollout

LAST = 8
SECONDS = 10


class Engines:
    """Sample batches when they are told to.

    begun: (step, version of the weights) of each batch, in the order in which they began
    """

    def __init__(self):
        self.version, self.begun = 0, []
        self._may_end, self._cancelled = threading.Semaphore(0), False

    def sample(self, step: int, prompts=None) -> Rollout:
        self.begun.append((step, self.version))
        assert self._may_end.acquire(timeout=SECONDS)
        if self._cancelled:
            raise RuntimeError("cancelled")
        return Rollout([step])

    def end(self, batches: int = 1) -> None:
        self._may_end.release(batches)

    def cancel(self) -> None:
        self._cancelled = True
        self.end()

    def wait_for(self, batches: int) -> None:
        """Wait until this many batches have begun, and see that no further one begins."""
        deadline = time.monotonic() + SECONDS
        while len(self.begun) < batches and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(0.05)
        assert [step for step, _ in self.begun] == list(range(1, batches + 1))


@pytest.fixture
def engines():
    return Engines()


def ahead_of(engines, staleness, request):
    ahead = SampledAhead(engines.sample, staleness, LAST, engines.cancel)
    request.addfinalizer(ahead.close)
    return ahead


@pytest.mark.parametrize("staleness", [1, 2, 3])
def test_no_batch_is_older_than_the_bound_and_none_is_discarded(engines, request, staleness):
    """Rule: a batch is admitted when an earlier one is taken for training, so that its age is bounded by
    counting. Another stack had 1,536 samples in flight for batches of 8, and dropped finished groups.
    """
    ahead = ahead_of(engines, staleness, request)
    engines.end(LAST)
    ages = []
    for step in range(1, LAST + 1):
        assert ahead.take(step).groups == [step]
        engines.wait_for(min(step + staleness, LAST))
        with ahead.paused():
            ages.append(engines.version - dict(engines.begun)[step])
            engines.version += 1
    assert max(ages) == staleness, "the bound is reached, because sampling takes no time"


def test_an_update_waits_for_the_batch_in_progress_and_holds_up_the_next(engines, request):
    """Rule: admission stands still while weights are applied. Otherwise a batch is of two versions."""
    ahead = ahead_of(engines, 2, request)
    engines.end()
    ahead.take(1)
    engines.wait_for(2)
    done = threading.Event()

    def update():
        with ahead.paused():
            engines.version += 1
            done.set()
            engines.wait_for(2)

    thread = threading.Thread(target=update)
    thread.start()
    assert not done.wait(0.1), "the update did not wait for batch 2"
    engines.end()
    thread.join(SECONDS)
    assert done.is_set()
    engines.wait_for(3)
    assert engines.begun == [(1, 0), (2, 0), (3, 1)]


def test_an_error_reaches_the_step_that_needs_the_batch(request):
    """Rule: whoever waits has a failure channel. Another trainer polled an empty buffer for hours."""

    def sample(step):
        if step == 3:
            raise OSError("an engine died")
        return step

    ahead = SampledAhead(sample, 2, LAST, lambda: None)
    request.addfinalizer(ahead.close)
    assert [ahead.take(1), ahead.take(2)] == [1, 2]
    for _ in range(2):
        with pytest.raises(OSError, match="an engine died"):
            ahead.take(3)


def test_the_end_cancels_what_is_sampled(engines):
    ahead = SampledAhead(engines.sample, 1, LAST, engines.cancel)
    engines.end()
    ahead.take(1)
    engines.wait_for(2)
    start = time.monotonic()
    ahead.close()
    assert time.monotonic() - start < SECONDS / 2
    assert "sampling ahead" not in [thread.name for thread in threading.enumerate()]


def test_busy_time_is_that_of_sampling_alone(engines, request):
    ahead = ahead_of(engines, 1, request)
    engines.end()
    ahead.take(1)
    engines.wait_for(2)
    time.sleep(0.2)
    first = ahead.take_busy()
    assert first >= 0.2
    engines.end()
    ahead.take(2)
    engines.end()
    engines.wait_for(3)
    ahead.take_busy()
    time.sleep(0.2)
    assert ahead.take_busy() <= 0.1, "nothing is sampled: batch 4 waits until batch 3 is taken"


def test_a_checkpoint_has_the_state_after_the_batch_that_was_trained(engines, request):
    """Rule: the cursor is that of settled prompts. Another stack saved the cursor of its sampler, and skipped
    675 of 736 prompts after a restart.
    """
    prompts = SimpleNamespace(state_dict=lambda: {"drawn": len(engines.begun)})
    source = SimpleNamespace(sample=engines.sample, cancel=engines.cancel, state_dict=dict)
    published = []
    weight_sync = SimpleNamespace(state_dict=lambda: len(published), close=lambda: None)
    handover = SimpleNamespace(
        weight_sync=weight_sync,
        metrics={},
        to_engines=lambda: None,
        to_ranks=lambda: None,
        publish=lambda: published.append(len(engines.begun)),
    )
    monitor = SimpleNamespace(phases=Phases())
    rollouts = RolloutPipeline(source, prompts, handover, monitor, staleness=2, last_step=LAST)
    request.addfinalizer(rollouts.close)
    assert rollouts.state_dict() == {"rollouts": {}, "prompts": {"drawn": 0}, "weight_sync": 0}
    engines.end(LAST)
    for step in (1, 2):
        assert rollouts.take(step).groups == [step]
        engines.wait_for(step + 2)
        rollouts.weights_changed()
        assert rollouts.state_dict() == {"rollouts": {}, "prompts": {"drawn": step}, "weight_sync": step}
        assert rollouts.metrics["rollout/sampling_seconds"] >= 0
