"""One step of the controller, with ranks that only report given measurements: what they are asked."""

import contextlib
from dataclasses import replace

import numpy as np
import pytest

from grpo_megatron.algorithm.algorithm import Algorithm
from grpo_megatron.algorithm.filters import apply_filters, group_filter
from grpo_megatron.algorithm.mismatch import WorstToken
from grpo_megatron.batch.prompt import Prompt
from grpo_megatron.batch.sample import Group, Sample
from grpo_megatron.batch.schedule import CostModel
from grpo_megatron.batch.sums import SequenceSums
from grpo_megatron.batch.train_batch import TrainBatch
from grpo_megatron.config.load import read_config
from grpo_megatron.controller import Controller
from grpo_megatron.errors import UserError
from grpo_megatron.metrics import Max, Mean, Sum, Top
from grpo_megatron.rewards.shaping import shape_rewards
from grpo_megatron.rollout.source import Rollout
from grpo_megatron.run.loop import StepLoop
from grpo_megatron.samples.entries import SampleState
from grpo_megatron.samples.ledger import Ledger
from grpo_megatron.trainer.policy import PolicyTrainer
from tests.ledgers import used_prompts
from tests.unit.ledger_steps import entries_of, states_of

LONGEST = 10


class Monitor:
    @contextlib.contextmanager
    def phases(self, name):
        yield

    def start_step(self, step): ...

    def text(self, step, name, text): ...

    def line(self, step, scalars): ...

    def shows_samples(self, step):
        return False

    def finish_step(self, step, scalars, trained_on):
        self.scalars = scalars
        return scalars | {"time/step": 1.0}


class Trainer(PolicyTrainer):
    """A trainer without ranks.

    differences: mismatch of engine and trainer that each optimizer step in turn measures.
    losses: loss of each step.
    """

    cost_model = CostModel()

    def __init__(self, *differences):
        self.differences, self.losses = differences, []

    def configure(self, config):
        self._epochs, self._reset_every = config.train.ppo_epochs, config.ref.reset_every

    def measure(self, mini_batches):
        batches = [TrainBatch.from_samples(mini.samples) for mini in mini_batches]
        masks = [(batch.cu_seqlens, batch.loss_mask, batch.loss_mask) for batch in batches]
        return [SequenceSums.of(*mask) for mask in masks], {}

    def train_mini_batch(self, mini, coefficients, loss):
        difference = self.differences[len(self.losses)]
        self.losses.append(loss)
        limit = loss.limits.get("mismatch/max")
        return {
            "actor/entropy": Mean(1.0, 1.0),
            "actor/dropped_steps": Sum(float(limit is not None and difference > limit)),
            "mismatch/max": Max(difference),
            "mismatch/worst": Top([WorstToken(difference, -1.0, -2.0, 0, 2, 4, (5, 6), 7, (7,))], 4),
        }


class Rollouts:
    version, metrics = None, {}

    def __init__(self, groups):
        self.groups = groups

    def take(self, step):
        return Rollout(self.groups)

    def weights_changed(self): ...


def group(number, *rewards, lengths=None):
    """Return a group.

    lengths: lengths of the responses; otherwise all have two tokens.
    """
    ids, samples = np.array([5, 6], np.int32), []
    for member, reward in enumerate(rewards):
        length = lengths[member] if lengths else 2
        sample = Sample.of(
            group_id=number,
            trajectory_id=len(rewards) * number + member,
            prompt_ids=ids,
            response_ids=np.full(length, 7, np.int32),
            loss_mask=np.ones(length, bool),
            rollout_logprobs=np.full(length, -1.0, np.float32),
            finish_reason="stop",
        )
        samples.append(sample.scored(reward, {}))
    return Group(number, Prompt(number, ids, "", "", {}), tuple(samples))


def config_of(groups, *changes):
    given = [
        "model.path=m",
        "data.train=d",
        f"data.train_batch_size={len(groups)}",
        "rollout.n=2",
        f"rollout.max_response_length={LONGEST}",
    ]
    return read_config(None, [*given, "data.max_prompt_length=4", "train.ppo_mini_batch_size=1", *changes])


def controller(folder, trainer, groups, *changes):
    """Return a controller whose ledger is in a folder."""
    config, monitor = config_of(groups, *changes), Monitor()
    trainer.configure(config)
    loop = StepLoop(config, None, monitor)
    algorithm, ledger = Algorithm(config), Ledger(str(folder))
    return Controller(config, Rollouts(groups), trainer, algorithm, monitor, loop, ledger)


def kept_and_shaped(groups, *changes):
    """Return the groups that a step trains on."""
    config = config_of(groups, *changes)
    return apply_filters(shape_rewards(groups, config, step=1), config.algorithm).groups


GROUPS = [group(0, 1.0, 0.0), group(1, 0.0, 1.0), group(2, 1.0, 0.0)]


@pytest.mark.parametrize("epochs", [1, 2])
@pytest.mark.parametrize("old", ["rollout", "current"])
def test_the_mismatchs_limit_holds_for_the_first_optimizer_step_alone(old, epochs, tmp_path):
    """Later the policy rightly differs from the engine's. The run would stop because of its own progress."""
    groups = GROUPS[:1] if old == "current" else GROUPS
    epochs = 1 if old == "current" else epochs
    trainer = Trainer(0.1, *[9.0] * 5)
    changes = [
        f"train.old_logprobs={old}",
        f"train.ppo_epochs={epochs}",
        "mismatch.action=stop",
        "mismatch.threshold=0.5",
    ]
    step = controller(tmp_path, trainer, groups, *changes)
    step.train_step(1)
    limits = [loss.mismatch_limit for loss in trainer.losses]
    assert limits == [0.5, *[None] * (len(groups) * epochs - 1)]
    assert step.monitor.scalars["mismatch/max"] == 0.1
    assert step.monitor.scalars["actor/dropped_steps"] == 0


def test_a_mismatch_of_the_first_optimizer_step_stops_the_run(tmp_path):
    trainer = Trainer(0.7, 0.1, 0.1)
    changes = ["train.old_logprobs=rollout", "mismatch.action=stop", "mismatch.threshold=0.5"]
    with pytest.raises(UserError, match=r"differ by up to 0\.7 nats"):
        controller(tmp_path, trainer, GROUPS, *changes).train_step(1)


@pytest.mark.parametrize("action", ["off", "warn", "mask"])
def test_other_actions_set_no_limit(action, tmp_path):
    trainer = Trainer(9.0, 9.0, 9.0)
    changes = ["train.old_logprobs=rollout", f"mismatch.action={action}"]
    controller(tmp_path, trainer, GROUPS, *changes).train_step(1)
    assert [loss.mismatch_limit for loss in trainer.losses] == [None] * 3


BUFFER = ["reward.overlong_buffer.length=4", "algorithm.filters=[nonzero_variance]"]


@pytest.mark.parametrize(
    ("groups", "kept"),
    [
        # All right, but one is punished for its length: that is a signal.
        ([group(0, 1.0, 1.0, lengths=(2, 9)), group(1, 1.0, 1.0)], [0]),
        ([group(0, 0.0, 0.0, lengths=(8, 9)), group(1, 0.0, 0.0)], [0]),
        # The punishment makes equal what was not.
        ([group(0, 0.0, 1.0, lengths=(2, 10)), group(1, 1.0, 0.0)], [1]),
        ([group(0, 0.25, 0.5, lengths=(8, 9)), group(1, 0.25, 0.5, lengths=(7, 7))], [1]),
        ([group(0, 1.0, 1.0, lengths=(10, 10)), group(1, 0.0, 1.0, lengths=(10, 10))], [1]),
    ],
)
def test_filters_see_the_rewards_that_are_trained_on(groups, kept):
    """They include the overlong punishment, as in rollout.dynamic_sampling (see its tests)."""
    assert [group.group_id for group in kept_and_shaped(groups, *BUFFER)] == kept


def test_a_control_experiment_shuffles_rewards_with_their_punishment():
    """The whole reward is shuffled: no response keeps the punishment for its own length."""
    groups = [group(number, 1.0, 1.0, lengths=(2, 10)) for number in range(8)]
    shuffled = kept_and_shaped(groups, *BUFFER[:1], "reward.shuffle_control=true")
    rewards = [[sample.reward for sample in one.samples] for one in shuffled]
    assert sorted(reward for pair in rewards for reward in pair) == [0.0] * 8 + [1.0] * 8
    assert any(pair[0] == 0.0 for pair in rewards)


def test_groups_that_a_filter_drops_are_used_up_but_not_trained_on(tmp_path):
    step = controller(
        tmp_path,
        Trainer(0.1),
        [GROUPS[0], replace(group(1, 1.0, 1.0), group_id=1)],
        "train.old_logprobs=rollout",
        *BUFFER,
    )
    step.train_step(1)
    assert used_prompts(tmp_path) == {1: [0, 1]}
    assert states_of(tmp_path, 1)[-1] == (1, 1, "trained")
    assert states_of(tmp_path, 2)[-1] == (1, 1, "filtered")
    counts = step.ledger.state_dict()
    assert (counts["totals"]["trained"], counts["totals"]["filtered"]) == (2, 2)
    assert (counts["tokens"], counts["prompts"]) == (8, 2)
    assert len(step.trainer.losses) == 1


@pytest.fixture
def twice(monkeypatch):
    """The name of a filter that returns the first group once more."""
    monkeypatch.setitem(group_filter._known, "twice", lambda groups: [*groups, groups[0]])
    return "twice"


def test_a_filter_that_returns_a_group_twice_ends_the_run_before_the_weights_are_published(twice, tmp_path):
    step = controller(
        tmp_path, Trainer(*[0.1] * 4), GROUPS, "train.old_logprobs=rollout", f"algorithm.filters=[{twice}]"
    )
    step.rollouts.weights_changed = lambda: pytest.fail("published")
    with pytest.raises(UserError, match=r"each of the samples 0, 1 was trained twice\. The usual cause"):
        step.train_step(1)


def test_the_ledger_says_which_optimizer_steps_were_dropped(tmp_path):
    """There are two epochs over three mini-batches, and the very first optimizer step is beyond the limit."""
    changes = ["train.old_logprobs=rollout", "train.ppo_epochs=2", "mismatch.action=stop"]
    step = controller(tmp_path, Trainer(9.0, *[0.0] * 5), GROUPS, *changes, "mismatch.threshold=0.5")
    step.checked_mismatch = lambda step, mismatch: mismatch
    step.train_step(1)
    trained = entries_of(tmp_path, SampleState.trained)
    assert trained["optimizer_step"].tolist() == [1, 1, 2, 2, 3, 3]
    assert trained["updates"].tolist() == [1, 1, 2, 2, 2, 2]
    assert trained["value"].tolist() == [0.25] * 6  # a mini-batch has four trained tokens, of equal weight


def test_a_step_whose_responses_are_all_empty_ends_the_run_before_training(tmp_path):
    def untrained(one):
        masked = (replace(sample, num_trained=0) for sample in one.samples)
        return replace(one, samples=tuple(masked))

    step = controller(tmp_path, trainer := Trainer(), [untrained(one) for one in GROUPS])
    with pytest.raises(UserError, match="step 1: all 6 responses are empty"):
        step.train_step(1)
    assert trainer.losses == []
