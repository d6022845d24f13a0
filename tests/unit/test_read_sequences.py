"""Some sequences of a step are read from the ranks, to be shown: their own tokens, with one call."""

from types import SimpleNamespace

import numpy as np
import pytest

from grpo_megatron.batch.prompt import Prompt
from grpo_megatron.batch.sample import Group
from grpo_megatron.batch.schedule import CostModel
from grpo_megatron.config.load import read_config
from grpo_megatron.megatron.mini_batches import MiniBatches
from grpo_megatron.model.parallel_sizes import ParallelSizes
from grpo_megatron.monitoring.run_files import RunFiles
from grpo_megatron.monitoring.trajectories import ShownTrajectory
from grpo_megatron.rollout.shown_trajectories import BEST, MISMATCH, WORST
from grpo_megatron.trainer.mini_batch import make_mini_batches
from grpo_megatron.trainer.policy import PolicyTrainer
from tests.models import random_samples
from tests.unit.test_train_step import GROUPS, Monitor, Trainer, controller

NAMES = ("tokens", "loss_mask", "rollout_logp", "old_logp")


class Ranks:
    """The last pipeline stage of two replicas, in the test's process. calls: methods that were called."""

    def __init__(self, config):
        rank = SimpleNamespace(pp_rank=0, last_stage=True, reports=True)
        self.replicas, self.calls = [MiniBatches(None, config, rank) for _ in range(2)], []

    def call(self, method, arguments):
        self.calls.append(method)
        name = method.removeprefix("mini_batches.")
        return [getattr(replica, name)(*own) for replica, own in zip(self.replicas, arguments, strict=True)]


class OnRanks(PolicyTrainer):
    """The driver's part of a trainer."""

    def __init__(self, config):
        self.sizes, self.ranks = ParallelSizes.from_config(config.megatron), Ranks(config)
        self.cost_model = CostModel()


@pytest.mark.parametrize("packing", [True, False])
def test_sequences_are_read_from_whichever_replica_has_them(packing):
    samples = [sample.scored(0.5, {}) for sample in random_samples(count=12)]
    groups = [
        Group(number, Prompt(number, np.array([1], np.int32), "", ""), tuple(samples[4 * number :][:4]))
        for number in range(3)
    ]
    changes = [
        "model.path=m",
        "data.train=d",
        "data.train_batch_size=3",
        "rollout.n=4",
        "train.old_logprobs=rollout",
        "train.ppo_mini_batch_size=2",
        "train.max_tokens_per_micro_batch=64",
        "megatron.data_parallel=2",
        f"train.packing={str(packing).lower()}",
    ]
    config = read_config(None, changes)
    trainer = OnRanks(config)
    mini_batches = make_mini_batches(groups, config, trainer.cost_model, 1)
    trainer.measure(mini_batches)
    wanted = [(mini_batches[0], [6, 0, 3, 7]), (mini_batches[1], [2])]
    read = trainer.read_sequences(wanted, *NAMES)
    assert trainer.ranks.calls == ["mini_batches.measure", "mini_batches.read_sequences"]
    assert [len(own) for own in read] == [4, 1]
    for (mini, indices), own in zip(wanted, read, strict=True):
        for index, (tokens, mask, engine, old) in zip(indices, own, strict=True):
            arrays = mini.samples[index].arrays
            first = len(arrays.prompt_ids) - 1
            assert tokens.tolist() == [*arrays.prompt_ids.tolist(), *arrays.response_ids.tolist()]
            assert mask[first:-1].tolist() == arrays.loss_mask.tolist()
            assert np.array_equal(engine[first:-1], arrays.rollout_logprobs)
            assert np.array_equal(old, engine)


class Watched(Monitor):
    """A monitor that keeps the trajectories of even steps."""

    def __init__(self):
        self.kept = []

    def shows_samples(self, step):
        return step % 2 == 0

    def trajectories(self, step, make):
        self.kept += [(step, shown) for shown in make()]


class Recomputing(Trainer):
    """A trainer whose log-probs differ by 1 from the engine's in the first token of each response."""

    def read_sequences(self, wanted, *names):
        assert names == NAMES
        return [[self._columns(mini.samples[index].arrays) for index in indices] for mini, indices in wanted]

    def _columns(self, arrays):
        ids = np.concatenate([arrays.prompt_ids, arrays.response_ids])
        engine, first = np.zeros(len(ids), np.float32), len(arrays.prompt_ids) - 1
        engine[first:-1] = arrays.rollout_logprobs
        mask = np.zeros(len(ids), bool)
        mask[first:-1] = arrays.loss_mask
        return ids, mask, engine, engine + np.float32(1.0) * (np.arange(len(ids)) == first)


def shown_by(folder, old: str, step: int) -> list[tuple[int, ShownTrajectory]]:
    trainer = Recomputing(*[0.1] * 3)
    loop = controller(folder, trainer, GROUPS, f"train.old_logprobs={old}")
    loop.monitor = Watched()
    loop.train_step(step)
    return loop.monitor.kept


def test_a_step_keeps_its_best_its_worst_and_its_largest_mismatch(tmp_path):
    kept = shown_by(tmp_path, "recompute", 2)
    assert [(step, one.sample, one.reasons, one.reward) for step, one in kept] == [
        (2, 0, [BEST, MISMATCH], 1.0),
        (2, 1, [WORST], 0.0),
    ]
    (token,) = kept[0][1].worst
    assert (token.position, token.engine, token.trainer, token.token) == (2, -1.0, 0.0, "7")
    files = RunFiles(str(tmp_path))
    for step, shown in kept:
        files.trajectory(step, shown)
    files.close()


def test_other_steps_fetch_nothing(tmp_path):
    assert shown_by(tmp_path, "recompute", 1) == []


def test_with_log_probs_of_the_engine_the_trainers_are_those_of_the_mismatch(tmp_path):
    """The ranks keep no log-probs of the trainer then, but the training pass reports the worst tokens."""
    ((_, best), (_, worst)) = shown_by(tmp_path, "rollout", 2)
    assert (best.compared, worst.compared) == ("worst", "none")
    assert [(one.engine, one.trainer, one.position) for one in best.worst] == [(-1.0, -2.0, 2)]
