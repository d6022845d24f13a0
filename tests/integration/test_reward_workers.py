"""Rewards in real workers.

A reward that hangs, dies, eats memory or fills the disk costs only its own sample.
"""

import asyncio
import pickle
import re
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
import ray

from grpo_megatron.batch.prompt import Prompt
from grpo_megatron.batch.sample import Sample
from grpo_megatron.cluster.worker_pool import worker_places
from grpo_megatron.config.reward import OnFailure, RewardConfig
from grpo_megatron.config.rollout import RolloutConfig
from grpo_megatron.data import PromptTokenizer
from grpo_megatron.errors import ProcessLost, UserError
from grpo_megatron.rewards import RewardWorkers
from grpo_megatron.rewards.scoring import ScorerSpec
from grpo_megatron.rollout.episodes import SingleTurn
from tests.integration.helpers import letters, spelled
from tests.integration.test_engine import running
from tests.rollouts import manager_of

PROMPT = Prompt(7, letters("ask"), "ask", "a", {})
FUNCTION = "tests.integration.helpers:obey"


def sample(response: str) -> Sample:
    ids = letters(response)
    return Sample.of(0, 0, PROMPT.ids, ids, np.ones(len(ids), bool), np.zeros(len(ids), np.float32), "stop")


def run(workers, *responses):
    async def score_all():
        return await asyncio.gather(*(workers.score(PROMPT, sample(response)) for response in responses))

    return asyncio.run(score_all())


def made(places, number=1, **options):
    config = RewardConfig(function=FUNCTION, timeout=2.0, memory_gib=0.5, file_mib=10, **options)
    return RewardWorkers(config, spelled, places(number))


@pytest.fixture(scope="module")
def forgiving(places):
    workers = made(places, on_failure=OnFailure.value, failure_value=-0.5)
    yield workers
    workers.close()


FAULTS = {
    "raise": "ZeroDivisionError: planted",
    "die": (
        r"its process \(reward worker 0\) died \(it ran out of memory, was killed, or called exit\); its "
        r"log is .*reward_worker0.log"
    ),
    "deaf": "did not return within reward.timeout=2.0 s and cannot be interrupted",
    "eat": "MemoryError",
    "write": "File too large",
}


# In `make test`, tests/integration/test_environment_workers.py has one that hangs.
@pytest.mark.slow_when(lambda fault: fault != "raise")
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_costs_one_sample(forgiving, capsys, fault):
    forgiving._warn._count = 0  # as if nothing had been logged
    start = time.monotonic()
    *before, failed, late = run(forgiving, *["fine"] * 1000, fault, "fine")
    assert time.monotonic() - start < 240
    assert [one.reward for one in (*before, late)] == [1.0] * 1001
    assert (failed.reward, failed.reward_failed, failed.response_text) == (-0.5, True, fault)
    assert not late.reward_failed
    said = capsys.readouterr().out
    assert re.search(FAULTS[fault] + ".*; the reward of this sample is reward.failure_value=-0.5", said), said


@pytest.mark.slow
def test_a_process_that_dies_takes_its_sample_out_of_the_group(places, capsys):
    workers = made(places, on_failure=OnFailure.leave_out)
    try:
        fine, dead, failed = run(workers, "fine", "die", "raise")
    finally:
        workers.close()
    assert (fine.reward, fine.is_left_out) == (1.0, False)
    assert dead.is_left_out
    assert failed.is_left_out
    assert re.search(
        FAULTS["die"] + r".*; this sample is left out \(reward.on_failure=leave_out\)",
        capsys.readouterr().out,
    )


@pytest.mark.slow
def test_memory_that_calls_keep_costs_no_sample(forgiving, capsys):
    """The worker has 512 MiB, and six of these calls need more."""
    assert [(one.reward, one.reward_failed) for one in run(forgiving, *["keep"] * 12)] == [(1.0, False)] * 12
    assert [one.reward_failed for one in run(forgiving, "keep", "eat", "keep")] == [False, True, False]
    assert "MemoryError" in capsys.readouterr().out


@pytest.mark.slow
def test_a_full_log_costs_one_sample(forgiving):
    """The log is a file under the size limit, and would be full for the next process too."""
    (full,) = run(forgiving, "shout")
    assert full.reward_failed
    assert [one.reward for one in run(forgiving, *["talk"] * 10)] == [1.0] * 10


def test_a_worker_whose_node_is_gone_is_lost(tmp_path):
    workers = RewardWorkers(
        RewardConfig(function=FUNCTION), spelled, worker_places(["ab" * 28], 1, str(tmp_path))
    )
    try:
        with pytest.raises(ProcessLost, match="reward worker 0 was lost in `start`"):
            run(workers, "fine")
    finally:
        workers.close()


@pytest.mark.slow
def test_who_stands_before_a_call_that_dies_has_no_blame(forgiving):
    """Both calls are tried alone, one after the other.

    Together, the first answer could be lost with the process.
    """
    for _ in range(4):
        first, dead, last = run(forgiving, "fine", "die", "fine")
        assert (first.reward, dead.reward, last.reward) == (1.0, -0.5, 1.0)


@pytest.mark.slow
def test_the_place_of_a_hang_is_in_the_log(forgiving):
    process = forgiving._pool._all[0]._place.process
    run(forgiving, "deaf")
    log = Path(process.log).read_text()
    assert "Timeout" in log
    assert "helpers.py" in log


@pytest.mark.slow
def test_messages_are_few(forgiving, capsys):
    forgiving._warn._count = 0  # as if nothing had been logged
    assert all(one.reward_failed for one in run(forgiving, *["raise"] * 100))
    assert len(capsys.readouterr().out.splitlines()) == 7  # the 1st, 2nd, 4th, ... 64th


@pytest.mark.slow
def test_unless_told_otherwise_a_failure_is_an_error(places):
    workers = made(places)
    try:
        with pytest.raises(
            UserError, match=r"reward tests.integration.helpers:obey failed on record 7 .*ZeroDivisionError"
        ):
            run(workers, "fine", "raise")
        with pytest.raises(ProcessLost, match="died"):
            run(workers, "fine", "die")
        assert [one.reward for one in run(workers, "fine")] == [1.0]
    finally:
        workers.close()


@pytest.mark.slow
def test_a_worker_that_is_killed_is_replaced(places, capsys):
    workers = made(places)
    try:
        (first,) = run(workers, "pid")
        psutil.Process(int(first.reward)).kill()
        psutil.Process(int(first.reward)).wait(30)
        pids = {one.reward for one in run(workers, *["pid"] * 50)}
        assert len(pids) == 1
        assert pids != {first.reward}
        assert "the calls that it was working on are retried once" in capsys.readouterr().out
    finally:
        workers.close()


@pytest.mark.slow
def test_an_answer_that_comes_behind_the_loss_of_its_process_counts(places):
    """A large answer may still be on its way from its node when the process dies in the next batch."""
    workers = made(places)

    async def late():
        worker = workers._pool._all[0]
        answer = await worker.work(pickle.dumps([]))
        assert not worker._asked
        assert await worker._answer(ray.put(answer)) == answer

    try:
        asyncio.run(late())
    finally:
        workers.close()


@pytest.mark.slow
def test_a_call_that_nobody_waits_for_costs_the_next_ones_nothing(places):
    workers = made(places, number=2)

    async def impatient():
        await asyncio.wait(
            [asyncio.ensure_future(workers.score(PROMPT, sample("nap"))) for _ in range(4)], timeout=0.2
        )

    try:
        run(workers, "fine")
        asyncio.run(impatient())
        assert [one.reward for one in run(workers, *["fine"] * 10)] == [1.0] * 10
    finally:
        workers.close()


def test_a_worker_that_cannot_start_is_one_clear_error(places, tmp_path, monkeypatch):
    """A node may, for example, lack a module."""
    (tmp_path / "here_alone.py").write_text("def one(prompt, response, answer, record):\n    return 1.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    workers = RewardWorkers(RewardConfig(function="here_alone:one"), spelled, places(1))
    try:
        with pytest.raises(UserError, match=r"reward.function=here_alone:one cannot be imported"):
            run(workers, "fine")
    finally:
        workers.close()


def test_the_workers_text_is_the_tokenizers(arithmetic):
    tokenizer = PromptTokenizer(str(arithmetic / "model"))
    ids = np.arange(tokenizer.vocab_size, dtype=np.int32)
    assert tokenizer.decoder(ids) == tokenizer.tokenizer.decode(ids.tolist()).replace("<pad>", "").replace(
        "<eos>", ""
    )
    assert ScorerSpec(RewardConfig(function=FUNCTION), tokenizer.decoder)().work([], 1.0) == []


class Timed(SingleTurn):
    """Records when the engines have finished, however long rewards take then."""

    async def play(self, episode, respond):
        async def timed(ids, most):
            completion = await respond(ids, most)
            self.generated = time.monotonic()
            return completion

        return await super().play(episode, timed)


@pytest.mark.slow
@pytest.mark.alone
def test_many_rewards_at_once_do_not_slow_generation(ray_here, arithmetic, tmp_path):
    """64 rewards each run a program for a fifth of a second in the sandbox. Medians of alternating rounds."""
    tokenizer = PromptTokenizer(str(arithmetic / "model"))
    asked = [Prompt(uid, tokenizer.encode(f"{uid}+{uid}"), "", "0") for uid in range(16)]
    seconds: dict[str, list[float]] = {"digits": [], "runs_a_program": []}
    with running(arithmetic, tokenizer, tmp_path) as (_, engines):
        node = [ray.get_runtime_context().get_node_id()]
        turns = {}
        for name in seconds:
            config = RewardConfig(function=f"tests.integration.helpers:{name}", timeout=120.0)
            workers = RewardWorkers(config, tokenizer.decoder, worker_places(node, 8, str(tmp_path / name)))
            turns[name] = Timed(workers)
        try:
            for number in range(6):
                for name, episodes in turns.items():
                    manager = manager_of(engines, episodes)
                    begun = time.monotonic()
                    manager.generate(asked, RolloutConfig(n=4, max_response_length=64))
                    if number:
                        seconds[name].append(episodes.generated - begun)
        finally:
            for episodes in turns.values():
                episodes.close()
    assert np.median(seconds["runs_a_program"]) < 1.1 * np.median(seconds["digits"]), seconds
