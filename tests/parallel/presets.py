"""Functions that the tests of presets run on each rank: a step like the controller's, with one replica."""

from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from grpo_megatron.algorithm.correction import Correction
from grpo_megatron.algorithm.kl import KLController
from grpo_megatron.algorithm.losses import PolicyLoss
from grpo_megatron.algorithm.mismatch import measure_mismatch
from grpo_megatron.batch.train_batch import TrainBatch
from grpo_megatron.config.schema import Config
from grpo_megatron.megatron.actor import Actor
from grpo_megatron.megatron.results import TrainResult
from grpo_megatron.metrics import Metrics
from tests.coefficients import set_coefficients
from tests.parallel.actors import micro_batches, reference_logprobs
from tests.parallel.optimizers import parameters_of
from tests.streams import selected, token_index


@dataclass
class Step:
    """The result of `steps`.

    batch: the batch as it was trained on.
    mismatch: metrics of the mismatch before training.
    moved: {parameter of this rank: its largest change}.
    """

    batch: TrainBatch
    mismatch: Metrics
    results: list[TrainResult | None]
    moved: dict[str, float]


class OneReplica:
    def __init__(self, config: Config, batch: TrainBatch):
        self.actor, self.batch = Actor(config), batch
        self.plan, self.parts = micro_batches(batch, config, 0, packing=True)

    def logprobs(self, reference: bool, keep_hidden: bool = False) -> np.ndarray:
        """Return the log-probs on every rank, float32 [T]."""
        if reference:
            own = reference_logprobs(self.actor, self.parts, key=(1, 0), keep_hidden=keep_hidden)
        else:
            own = self.actor.passes.logprobs(self.parts, key=(1, 0))
        everyone: list = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, own)
        out = np.empty(self.batch.num_tokens, dtype=np.float32)
        out[token_index(self.batch, self.plan.sequences(0))] = next(
            part for part in everyone if part is not None
        )
        return out

    def train_step(self, loss: PolicyLoss) -> TrainResult | None:
        parts = [selected(self.batch, sequences) for sequences in self.plan.micro_batches[0]]
        return self.actor.passes.train_step(parts, loss, self.batch.num_tokens, key=(1, 0))


def steps(config: Config, batch: TrainBatch, old_shift: float = 0.0, count: int = 1) -> Step:
    """Do `count` optimizer steps on one batch with the given configuration.

    old_shift: added to the old log-probs, so that the policy ratio is exp(-old_shift) in the first step.
    """
    replica = OneReplica(config, batch)
    loss = PolicyLoss.from_config(config.algorithm, config.mismatch, known_before=True)
    batch.old_logp = replica.logprobs(reference=False)
    batch.rollout_logp = batch.old_logp + np.where(batch.loss_mask, batch.rollout_logp, 0)
    mismatch = measure_mismatch([batch])
    batch.old_logp = batch.old_logp + np.float32(old_shift)
    if config.algorithm.needs_reference:
        batch.ref_logp = replica.logprobs(reference=True, keep_hidden=loss.needs_full_kl)
    controller = KLController.from_config(config.algorithm.kl_ctrl)
    set_coefficients([batch], config, Correction.from_config(config.mismatch), controller)
    before = parameters_of(replica.actor)
    results = [replica.train_step(loss) for _ in range(count)]
    after = parameters_of(replica.actor)
    moved = {name: float((after[name] - before[name]).abs().max()) for name in before}
    return Step(batch, mismatch, results, moved)


def reference_reset(config: Config, batch: TrainBatch) -> dict[str, torch.Tensor]:
    """Return log-probs of policy and reference: at first, after a step, after a reset, and after another
    step.
    """
    replica = OneReplica(config, batch)
    found = {}
    for when in ("first", "stepped", "reset", "stepped again"):
        if when.startswith("stepped"):
            replica.train_step(PolicyLoss())
        if when == "reset":
            replica.actor.weights.reset_reference()
        for name, reference in (("policy", False), ("reference", True)):
            found[f"{when}: {name}"] = replica.logprobs(reference)
    return found
