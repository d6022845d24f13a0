"""Passes over micro-batches, through Megatron's pipeline schedules.

On scaling: Megatron divides all gradients by the token count that loss functions return, summed
over micro-batches and ranks (``calculate_per_token_loss``). Ours return (M * sum w l, their share
of M), with M the tokens of the whole optimizer step, so that exactly ``sum w l`` remains and MoE
auxiliary losses, which Megatron adds per token, are scaled rightly.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from megatron.core import parallel_state as mpu
from megatron.core.pipeline_parallel import get_forward_backward_func

from grpo_megatron.algorithm.losses import LossInputs, TokenLoss
from grpo_megatron.batch import Layout, Pack, TrainBatch
from grpo_megatron.megatron.logprobs import token_logprobs
from grpo_megatron.megatron.modules import PackedSequences, describe_pack
from grpo_megatron.metrics import Metrics, Sum


@dataclass
class MicroBatch:
    """One micro-batch as this rank sees it: t local positions, on the rank's device."""

    pack: Pack
    packed: PackedSequences
    tokens: torch.Tensor  # int64 [1, t]
    position_ids: torch.Tensor  # int64 [1, t]
    target: torch.Tensor  # int64 [t]
    weight: torch.Tensor  # float32 [t]
    inputs: LossInputs


def prepare(batch: TrainBatch, layout: Layout, device: torch.device, current_is_old: bool = False) -> MicroBatch:
    """Lay one micro-batch out on this rank. current_is_old: the old policy is the current one."""
    pack = layout.pack(batch.lengths)

    def local(array: np.ndarray) -> torch.Tensor:
        return pack.scatter(array).to(device)

    return MicroBatch(
        pack=pack,
        packed=describe_pack(pack, device),
        tokens=local(batch.tokens).long()[None],
        position_ids=torch.from_numpy(pack.position_ids).to(device)[None],
        target=local(batch.target).long(),
        weight=local(batch.weight),
        inputs=LossInputs(
            mask=local(batch.loss_mask),
            advantage=local(batch.advantage),
            rollout_logp=local(batch.rollout_logp),
            ref_logp=local(batch.ref_logp),
            old_logp=None if current_is_old else local(batch.old_logp),
        ),
    )


@dataclass(frozen=True)
class Head:
    """Hidden states of a micro-batch -> log-prob and entropy of its targets, both [t]."""

    weight: Callable[[], torch.Tensor]
    vocab_size: int
    sequence_parallel: bool

    def __call__(self, hidden: torch.Tensor, micro_batch: MicroBatch, temperature: float):
        return token_logprobs(
            hidden[0],  # [1, t, h]: packs are one row
            self.weight(),
            micro_batch.target,
            temperature,
            self.vocab_size,
            mpu.get_tensor_model_parallel_group(),
            self.sequence_parallel,
        )


def _run(model, micro_batches: list[MicroBatch], loss_func, forward_only: bool) -> list:
    """Megatron's schedule over the micro-batches; what loss_func stored, on the last stage."""

    def forward_step(iterator: Iterator[MicroBatch], model):
        micro_batch = next(iterator)
        hidden = model(micro_batch.tokens, micro_batch.position_ids, None, packed_seq_params=micro_batch.packed)
        return hidden, lambda output, non_loss_data=False: loss_func(output, micro_batch)

    return get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iter(micro_batches),
        model=model,
        num_microbatches=len(micro_batches),
        seq_length=micro_batches[0].tokens.shape[1],  # only a default: stages exchange the real shapes
        micro_batch_size=1,
        forward_only=forward_only,
        collect_non_loss_data=forward_only,
    )


@torch.no_grad()
def forward_logprobs(model, micro_batches: list[MicroBatch], head: Head, temperature: float) -> list[np.ndarray]:
    """Log-probs of the targets, one float32 [T] per micro-batch; empty except on the last stage."""

    def collect(hidden: torch.Tensor, micro_batch: MicroBatch) -> np.ndarray:
        logp, _ = head(hidden, micro_batch, temperature)
        return micro_batch.pack.gather(logp, mpu.get_context_parallel_group()).cpu().numpy()

    return _run(model, micro_batches, collect, forward_only=True)


def forward_backward(
    model, micro_batches: list[MicroBatch], head: Head, loss: TokenLoss, temperature: float, step_tokens: int
) -> list[Metrics]:
    """Gradients of sum_t w_t l_t into the model's buffers; metrics per micro-batch on the last stage.

    step_tokens: M, tokens of the optimizer step over all ranks, padding excluded.
    """

    def compute(hidden: torch.Tensor, micro_batch: MicroBatch):
        logp, entropy = head(hidden, micro_batch, temperature)
        token_loss, metrics = loss(logp, entropy, micro_batch.inputs)
        total = (micro_batch.weight * token_loss).sum()
        metrics["actor/loss"] = Sum(total.detach().clone())  # schedules divide the loss in place
        share = torch.tensor(int((micro_batch.pack.index >= 0).sum()), dtype=torch.int, device=total.device)
        return total * step_tokens, share, metrics

    return _run(model, micro_batches, compute, forward_only=False)
