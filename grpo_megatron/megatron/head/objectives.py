"""Heads and objectives, which run on the last pipeline stage.

A head turns hidden states into log-probs (language model) or scores (reward model). An objective applies the
head and then the loss. The training pass calls it for each micro-batch.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from megatron.core import parallel_state as mpu

from grpo_megatron.algorithm.losses import TokenLoss
from grpo_megatron.algorithm.preferences import PreferenceLoss
from grpo_megatron.batch.examples import ExampleBatch
from grpo_megatron.batch.pairs import PairBatch
from grpo_megatron.batch.token_stream import TokenStream
from grpo_megatron.batch.train_batch import TrainBatch
from grpo_megatron.config.schema import Config
from grpo_megatron.megatron.head.logprobs import HeadOutput, token_logprobs
from grpo_megatron.megatron.head.score import ScoreHead
from grpo_megatron.megatron.layers.build import output_weight
from grpo_megatron.megatron.micro_batch import (
    MicroBatch,
    set_example_inputs,
    set_loss_inputs,
    set_pair_inputs,
)
from grpo_megatron.metrics import Metrics, Sum
from grpo_megatron.model.architecture import Architecture

# (hidden states, micro-batch) -> (sum of weight times loss, metrics)
Objective = Callable[[torch.Tensor, MicroBatch], tuple[torch.Tensor, Metrics]]


@dataclass(frozen=True)
class Head:
    """Head of a language model: computes log-prob, entropy and optionally KL of tokens from hidden states."""

    weight: Callable[[], torch.Tensor]
    """Function that returns this TP rank's rows of the output projection, [V_padded / tp, h]."""
    vocab_size: int
    """Size of the vocabulary, without padding."""
    sequence_parallel: bool
    """True if hidden states are split over the TP ranks."""
    temperature: float
    """Divisor of the logits."""
    exact_logits: bool = False
    """If True, do not round logits to the weight's dtype."""
    reference_weight: Callable[[], torch.Tensor] | None = None
    """Function that returns the reference's output projection, for the exact KL. None: compute no KL."""

    def __call__(self, hidden: torch.Tensor, micro_batch: MicroBatch) -> HeadOutput:
        """Return log-prob and entropy of all t target tokens of this CP rank, each [t].

        hidden: last hidden states [1, t, h]; with sequence parallelism [1, t / tp, h].
        """
        return self._values(hidden, micro_batch.target, None, None)

    def of_trained(self, hidden: torch.Tensor, micro_batch: MicroBatch, with_kl: bool = False) -> HeadOutput:
        """Return log-prob and entropy, each [t], of the target tokens whose loss counts, and zeros elsewhere.

        Only the tokens in micro_batch.trained are computed, so prompt tokens cost nothing.

        hidden: last hidden states [1, t, h]; with sequence parallelism [1, t / tp, h].
        with_kl: if True, also return the exact KL. The micro-batch must have the reference's hidden states.
        """
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
            # Weights that DDP trains have a main_grad. Frozen weights and a frozen model's weights have none.
            accumulate_into_main_grad=hasattr(weight, "main_grad"),
            exact_logits=self.exact_logits,
            positions=positions,
        )


def _spread(values: torch.Tensor, micro_batch: MicroBatch) -> torch.Tensor:
    """Return a [t] tensor with `values` [n] at the indices micro_batch.trained, and zeros elsewhere."""
    return values.new_zeros(len(micro_batch.target)).index_copy(0, micro_batch.trained, values)


def make_head(chunks: list, arch: Architecture, config: Config) -> Head | ScoreHead:
    """Return the head for a model: Head for a language model, ScoreHead for a reward model.

    The head computes log-probs or scores from hidden states. It looks up the output weight only when it is
    called, because only the last pipeline stage has this weight.

    chunks: this rank's model chunks.
    """
    weight, sequence_parallel = (lambda: output_weight(chunks[-1])), config.megatron.sequence_parallel
    if arch.scalar_head:
        return ScoreHead(weight, sequence_parallel)
    temperature, exact = config.rollout.temperature, config.model.fp32_head
    return Head(weight, arch.vocab_size, sequence_parallel, temperature, exact)


def make_objective(
    head: Head | ScoreHead,
    loss: TokenLoss | PreferenceLoss,
    prepared: list[MicroBatch],
    streams: Sequence[TokenStream],
    current_is_old: bool,
    keep_logprobs: bool = False,
) -> Objective:
    """Store the loss's inputs in the micro-batches. Return the objective function of the training pass.

    The objective is a function (hidden states, micro-batch) -> (sum of weight times loss, metrics).

    prepared: micro-batches as model inputs.
    streams: the micro-batches' data, from which `prepared` was made: TrainBatch for a policy, ExampleBatch
        for supervised training, PairBatch for a reward model.
    current_is_old: if True, the current log-probs serve as the old policy's (train.old_logprobs=current).
    keep_logprobs: if True, the objective stores the log-probs of a policy in MicroBatch.logp.
    """
    for micro_batch, stream in zip(prepared, streams, strict=True):
        match stream:
            case PairBatch():
                set_pair_inputs(micro_batch, stream)
            case ExampleBatch():
                set_example_inputs(micro_batch, stream)
            case TrainBatch():
                set_loss_inputs(micro_batch, stream, current_is_old)
    return _of_pairs(head, loss) if isinstance(head, ScoreHead) else _of_tokens(head, loss, keep_logprobs)


def _of_tokens(head: Head, loss: TokenLoss, keep_logprobs: bool) -> Objective:
    """Return a language model's objective function: it sums weight times loss over this CP rank's tokens.

    The function takes (hidden states, micro-batch) and returns (sum, metrics).

    keep_logprobs: if True, the function stores the log-probs in MicroBatch.logp.
    """

    def objective(hidden: torch.Tensor, micro_batch: MicroBatch) -> tuple[torch.Tensor, Metrics]:
        new = head.of_trained(hidden, micro_batch, loss.needs_full_kl)
        if keep_logprobs:
            micro_batch.logp = new.logp.detach()
        token_loss, metrics = loss(new.logp, new.entropy, micro_batch.inputs, new.kl)
        total = (micro_batch.weight * token_loss).sum()
        metrics["actor/loss"] = Sum(total.detach().clone())  # a clone: Megatron divides the loss in place
        return total, metrics

    return objective


def _of_pairs(head: ScoreHead, loss: PreferenceLoss) -> Objective:
    """Return a reward model's objective function: it sums weight times loss over preference pairs.

    The function takes (hidden states, micro-batch) and returns (sum, metrics). Every CP rank computes the
    whole sum, but only the gradient through its own tokens. Only CP rank 0 returns metrics, so that no pair
    is counted twice.
    """

    def objective(hidden: torch.Tensor, micro_batch: MicroBatch) -> tuple[torch.Tensor, Metrics]:
        pair_loss, metrics = loss(head(hidden, micro_batch), micro_batch.inputs)
        total = (micro_batch.inputs.weight * pair_loss).sum()
        metrics["actor/loss"] = Sum(total.detach().clone())  # a clone, as in `_of_tokens`
        return (
            total,
            metrics if mpu.get_context_parallel_rank() == 0 else {},
        )  # other CP ranks would count the pairs again

    return objective
