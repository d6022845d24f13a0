"""What the last stage makes of hidden states: of a language model the log-probs of its targets, of a reward model scores; and the loss."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from megatron.core import parallel_state as mpu

from grpo_megatron.algorithm.losses import TokenLoss
from grpo_megatron.algorithm.preferences import PreferenceLoss
from grpo_megatron.batch.train_batch import TrainBatch
from grpo_megatron.megatron.logprobs import HeadOutput, token_logprobs
from grpo_megatron.megatron.micro_batch import MicroBatch, set_loss_inputs, set_pair_inputs
from grpo_megatron.megatron.model import output_weight
from grpo_megatron.megatron.score_head import ScoreHead
from grpo_megatron.megatron.spec import ActorSpec
from grpo_megatron.metrics import Metrics, Sum
from grpo_megatron.model.architecture import Architecture

# (hidden states, micro-batch) -> (sum of weight times loss, metrics)
Objective = Callable[[torch.Tensor, MicroBatch], tuple[torch.Tensor, Metrics]]


@dataclass(frozen=True)
class Head:
    """Hidden states of a micro-batch -> log-prob, entropy (and KL to the reference) of its targets.

    exact_logits: see token_logprobs. reference_weight: the reference's output projection, for the exact KL; None: no KL.
    """

    weight: Callable[[], torch.Tensor]
    vocab_size: int
    sequence_parallel: bool
    temperature: float
    exact_logits: bool = False
    reference_weight: Callable[[], torch.Tensor] | None = None

    def __call__(self, hidden: torch.Tensor, micro_batch: MicroBatch) -> HeadOutput:
        """Compute all targets. Without a KL."""
        return self._values(hidden, micro_batch.target, None, None)

    def of_trained(self, hidden: torch.Tensor, micro_batch: MicroBatch, with_kl: bool) -> HeadOutput:
        """Compute the targets at the trained positions, and return zeros at the others: prompts cost nothing in the head."""
        reference = (micro_batch.hidden_of_reference(), self.reference_weight()) if with_kl else None
        found = self._values(hidden, micro_batch.target, micro_batch.trained, reference)
        return HeadOutput(*(value if value is None else _spread(value, micro_batch) for value in found))

    def _values(
        self, hidden: torch.Tensor, target: torch.Tensor, positions: torch.Tensor | None, reference
    ) -> HeadOutput:
        weight = self.weight()
        return token_logprobs(
            hidden[0],  # [1, t, h]: packs are one row
            weight,
            target,
            self.temperature,
            self.vocab_size,
            mpu.get_tensor_model_parallel_group(),
            self.sequence_parallel,
            reference=reference,
            # A frozen one has no place for a gradient, and one beside DDP is never trained.
            accumulate_into_main_grad=hasattr(weight, "main_grad"),
            exact_logits=self.exact_logits,
            positions=positions,
        )


def _spread(values: torch.Tensor, micro_batch: MicroBatch) -> torch.Tensor:
    """Put the values of the trained positions at their places among all t, zeros elsewhere."""
    return values.new_zeros(len(micro_batch.target)).index_copy(0, micro_batch.trained, values)


def make_head(chunks: list, arch: Architecture, spec: ActorSpec) -> Head | ScoreHead:
    """Of the last of these chunks, whose weight is looked up when it is needed."""
    weight, sequence_parallel = (lambda: output_weight(chunks[-1])), spec.sizes.sequence_parallel
    if arch.scalar_head:
        return ScoreHead(weight, sequence_parallel)
    return Head(weight, arch.vocab_size, sequence_parallel, spec.temperature, spec.fp32_head)


def make_objective(
    head: Head | ScoreHead,
    loss: TokenLoss | PreferenceLoss,
    prepared: list[MicroBatch],
    batches: list[TrainBatch],
    current_is_old: bool,
) -> Objective:
    """Of one training pass; what the loss needs is put into the micro-batches. current_is_old: see config OldLogprobs."""
    for micro_batch, batch in zip(prepared, batches, strict=True):
        if isinstance(head, ScoreHead):
            set_pair_inputs(micro_batch, batch)
        else:
            set_loss_inputs(micro_batch, batch, current_is_old)
    return _of_pairs(head, loss) if isinstance(head, ScoreHead) else _of_tokens(head, loss)


def _of_tokens(head: Head, loss: TokenLoss) -> Objective:
    """sum_t w_t l_t over the targets of a micro-batch that are on this CP rank."""

    def objective(hidden: torch.Tensor, micro_batch: MicroBatch) -> tuple[torch.Tensor, Metrics]:
        new = head.of_trained(hidden, micro_batch, loss.needs_full_kl)
        token_loss, metrics = loss(new.logp, new.entropy, micro_batch.inputs, new.kl)
        total = (micro_batch.weight * token_loss).sum()
        metrics["actor/loss"] = Sum(total.detach().clone())  # schedules divide the loss in place
        return total, metrics

    return objective


def _of_pairs(head: ScoreHead, loss: PreferenceLoss) -> Objective:
    """sum_p w_p l_p over the pairs of a micro-batch. All CP ranks have the value, each the gradient of what it holds."""

    def objective(hidden: torch.Tensor, micro_batch: MicroBatch) -> tuple[torch.Tensor, Metrics]:
        pair_loss, metrics = loss(head(hidden, micro_batch), micro_batch.inputs)
        total = (micro_batch.inputs.weight * pair_loss).sum()
        metrics["actor/loss"] = Sum(total.detach().clone())  # as above
        return (
            total,
            metrics if mpu.get_context_parallel_rank() == 0 else {},
        )  # the others would count the pairs again

    return objective
