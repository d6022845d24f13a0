"""Functions that the tests on TransformerEngine's layers run on each rank, and the comparison of layouts."""

from dataclasses import dataclass

import numpy as np
import torch

from grpo_megatron.batch.train_batch import TrainBatch
from grpo_megatron.config.fp8 import FP8Recipe
from grpo_megatron.config.schema import Config, Precision
from grpo_megatron.megatron.actor import Actor
from grpo_megatron.megatron.process_groups import RankInfo
from grpo_megatron.megatron.state.hf_weights import local_parameters
from grpo_megatron.megatron.trained_model import TrainedModel
from grpo_megatron.megatron.without_gpu.emulation import packed_attention
from grpo_megatron.model.pieces import box
from tests.parallel.actors import micro_batches


@dataclass
class FirstStep:
    """The result of `first_step` on one rank.

    gradients: {Megatron name: this rank's shard}.
    difference: largest difference of the policy's and the reference's log-probs before the step, with the
        same weights; None on ranks that do not report.
    norms: gradient norms of two steps.
    """

    rank: RankInfo
    gradients: dict[str, torch.Tensor]
    difference: float | None
    norms: list[float]


def first_step(
    config: Config,
    batch: TrainBatch,
    loss,
    folder: str | None,
    padding_statistics: float = 0.0,
    build: type[TrainedModel] = TrainedModel,
) -> FirstStep:
    """Compute log-probs of policy and reference, export to `folder` as HF, and do two optimizer steps.

    The gradients are those of the first step.
    """
    packed_attention.PADDING_STATISTICS = padding_statistics
    actor = Actor(config, build=build)
    if folder:
        actor.weights.save_hf(folder)
    _, parts = micro_batches(batch, config, actor.rank.dp_rank, packing=True, max_tokens=256)
    policy = actor.passes.logprobs(parts)
    with actor.passes.reference():
        reference = actor.passes.logprobs(parts, reference=True)
    gradients, norms = {}, []
    if config.megatron.precision == Precision.fp8 and config.megatron.fp8.recipe == FP8Recipe.delayed:
        # It scales gradients by earlier ones. With none, most of them are too small for E5M2.
        actor.passes.compute_gradients(parts, loss, batch.num_tokens, current_is_old=True)
    for step in range(2):
        actor.passes.compute_gradients(parts, loss, batch.num_tokens, current_is_old=True)
        if step == 0:
            trained = local_parameters(actor.model.chunks)
            gradients = {name: parameter.main_grad.detach().clone() for name, parameter in trained.items()}
        with actor.model.memory.optimizer_at_hand():
            norms.append(actor.model.optimizer.step().grad_norm)
    difference = None if policy is None else float(np.abs(policy - reference).max())
    return FirstStep(actor.rank, gradients, difference, norms)


def first_step_with_unsummed_norms(config: Config, batch: TrainBatch, loss) -> FirstStep:
    """Do the same with a planted fault: a norm's gradient on each rank is that of the rank's own tokens."""

    class Faulty(TrainedModel):
        def _set_up_training(self):
            for chunk in self.chunks:
                for name, parameter in chunk.named_parameters():
                    if name.endswith("norm.weight"):
                        parameter.sequence_parallel = False
            super()._set_up_training()

    return first_step(config, batch, loss, None, build=Faulty)


def cosines(entries, sizes, result: FirstStep, whole: dict[str, torch.Tensor]) -> dict[str, float]:
    """Return {gradient of this rank: its cosine with the same part of the whole one}, 1 where both are
    zero.
    """
    found = {}
    for name, own in result.gradients.items():
        entry = entries[name]
        tp, rank = (sizes.etp, result.rank.etp_rank) if entry.expert else (sizes.tp, result.rank.tp_rank)
        expected = torch.zeros(entry.megatron_shape(tp))
        for piece in entry.megatron_pieces(tp, rank):
            piece.of(expected).copy_(whole[piece.hf][box(piece.start, piece.shape)])
        own, expected = own.flatten().double(), expected.flatten().double()
        sizes_of = own.norm() * expected.norm()
        found[name] = float(own @ expected / sizes_of) if sizes_of else float(own.norm() == expected.norm())
    return found
