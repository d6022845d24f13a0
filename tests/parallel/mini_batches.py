"""A trainer that runs in the ranks themselves, and a step of it that the tests compare between layouts."""

from dataclasses import dataclass
from operator import attrgetter

import numpy as np
import torch
import torch.distributed as dist

from grpo_megatron.algorithm.algorithm import Algorithm
from grpo_megatron.batch.prompt import Prompt
from grpo_megatron.batch.sample import Group, Sample
from grpo_megatron.batch.sums import SequenceSums
from grpo_megatron.config.schema import Config
from grpo_megatron.megatron.actor import Actor
from grpo_megatron.megatron.state.hf_weights import iterate_hf
from grpo_megatron.metrics import Metrics
from grpo_megatron.model.families import read_architecture
from grpo_megatron.monitoring.phases import Phases
from grpo_megatron.trainer.mini_batch import make_mini_batches
from grpo_megatron.trainer.optimizer_steps import OptimizerSteps
from grpo_megatron.trainer.policy import PolicyTrainer
from grpo_megatron.trainer.ranks import RankGroup
from grpo_megatron.trainer.weights import TrainerWeights
from tests.configs import sizes_of

COLUMNS = ("old_logp", "ref_logp", "loss_mask", "weight", "advantage", "policy_factor")


class EveryRank(RankGroup):
    """All ranks of a trainer, of which each runs the driver too. Every rank must make the same calls."""

    def __init__(self, actor: Actor):
        self._actor, self.replicas = actor, sizes_of(actor.config).dp

    def call(self, method, args_of_replica):
        rank = self._actor.rank
        result = attrgetter(method)(self._actor)(*args_of_replica[rank.dp_rank])
        everyone: list = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, (rank.dp_rank, rank.reports, result))
        reported = {dp: result for dp, reports, result in everyone if reports}
        return [reported[dp] for dp in range(self.replicas)]


class TrainerOnEveryRank(PolicyTrainer):
    """A trainer whose driver runs on every rank."""

    def __init__(self, actor: Actor):
        self.sizes, self.ranks = sizes_of(actor.config), EveryRank(actor)
        self.cost_model = read_architecture(actor.config.model.path).cost_model
        self.weights = TrainerWeights(self.ranks)
        self._steps = OptimizerSteps(actor.config.optimizer, self.weights)
        self._epochs, self._reset_every = actor.config.train.ppo_epochs, actor.config.ref.reset_every


def groups_of(samples: list[Sample]) -> list[Group]:
    """Return groups of four samples each."""
    return [
        Group(i, Prompt(i, samples[4 * i].arrays.prompt_ids, "", ""), tuple(samples[4 * i : 4 * i + 4]))
        for i in range(len(samples) // 4)
    ]


@dataclass
class Step:
    """One step of training, as the driver sees it."""

    sums: list[SequenceSums]
    """The sums of each mini-batch."""
    columns: list[dict[str, np.ndarray]]
    """The columns of each mini-batch's tokens after training."""
    metrics: list[Metrics]
    """The metrics before training, and of each optimizer step."""
    weights: dict[str, torch.Tensor]
    """The whole weights at the end, by name. Each is on one rank only."""
    micro_batches: list[int]
    """Number of micro-batches of each mini-batch, over all replicas."""


def step(config: Config, samples: list[Sample]) -> Step:
    """Make one step on groups of four samples, as the controller makes it."""
    actor, algorithm = Actor(config), Algorithm(config)
    trainer = TrainerOnEveryRank(actor)
    mini_batches = make_mini_batches(groups_of(samples), config, trainer.cost_model, step=1)
    sums, before = trainer.measure(mini_batches)
    coefficients, _ = algorithm.coefficients([mini.table for mini in mini_batches], sums)
    trained = trainer.train(1, mini_batches, coefficients, algorithm.loss, Phases())
    columns = [dict(zip(COLUMNS, trainer.read(mini, *COLUMNS), strict=True)) for mini in mini_batches]
    with actor.model.settled_weights():
        weights = {name: p.clone() for name, p in iterate_hf(actor.model.chunks, actor.model.entries)}
    parts = [sum(len(own) for own in mini.plan.micro_batches) for mini in mini_batches]
    return Step(sums, columns, [before, *trained], weights, parts)
