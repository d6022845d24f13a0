"""The head: hidden states in; log-prob, entropy and KL to a reference per token out.

Megatron's own post-processing turns hidden states into logits first and always; here the
projection is part of the function (`fused_head`), so that no [t, V] tensor is ever alive.
"""

from typing import NamedTuple

import torch
from megatron.core import tensor_parallel
from megatron.core.tensor_parallel import ColumnParallelLinear

from grpo_megatron.megatron.fused_head import FusedHead, HeadTask, Tiling


class HiddenStatesOutput(ColumnParallelLinear):
    """An output layer that hands out its input: same parameters and names, no projection."""

    def forward(self, input_, weight=None, runtime_gather_output=None):
        return input_, None


def hand_out_hidden_states(model) -> None:
    """Make a GPTModel return hidden states [1, t, h] in place of logits.

    The class of the existing layer is exchanged, because GPTModel constructs its output layer
    itself; parameter, names and sharded checkpoint state stay what they were.
    """
    model.output_layer.__class__ = HiddenStatesOutput


class HeadOutput(NamedTuple):
    """Values of each computed token, float32 [t] or [n], natural log; equal on every TP rank.

    logp: log-prob of the target. entropy: entropy of the distribution. kl: sum_v p_v (log p_v - log q_v) over
    the whole vocabulary, q the reference's distribution; None without a reference.
    """

    logp: torch.Tensor
    entropy: torch.Tensor
    kl: torch.Tensor | None


def token_logprobs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    temperature: float,
    vocab_size: int,
    tp_group,
    sequence_parallel: bool,
    reference: tuple[torch.Tensor, torch.Tensor] | None = None,
    chunk_tokens: int | None = None,
    chunk_vocab: int | None = None,
    accumulate_into_main_grad: bool = False,
    exact_logits: bool = False,
    positions: torch.Tensor | None = None,
) -> HeadOutput:
    """Log-prob of each target, entropy of each distribution and, with a reference, the exact KL.

    hidden [t, h] (with sequence_parallel [t / tp, h], this rank's part); weight [V_padded / tp, h],
    this rank's rows of the output projection (the embedding if tied); target int64 [t], ids below
    vocab_size (any other id has log-prob NaN). Distributions are softmax(logits / temperature) over
    vocab_size words, in float32 whatever the weights' dtype. Differentiable in hidden and weight
    (once); an output the loss does not use costs nothing in the backward pass. Every TP rank must
    compute the same loss from what is returned.

    reference: (hidden, weight) of the reference model, of the same shapes; no gradient flows into
    them, and they must stay unchanged until the backward pass, which reads them again.
    chunk_tokens, chunk_vocab: the size of a tile; None: 8 MiB of float32 logits and at most 1024
    tokens on a CPU, 128 MiB and 4096 on a GPU. Results differ by rounding only.
    accumulate_into_main_grad: add the weight's gradient to `weight.main_grad`, as Megatron's
    gradient_accumulation_fusion does, and leave no meaningful `weight.grad`.
    exact_logits: do not round logits to the weight's dtype; the gradient's products still take factors of that dtype.
    positions: int64 [n], the tokens to compute; the outputs are then [n], and the others cost nothing. None: all t.

    Raises ValueError for a target, temperature or chunk size that does not fit, or a missing main_grad.
    """
    if temperature <= 0:
        raise ValueError(f"temperature must be above 0, is {temperature}")
    if accumulate_into_main_grad and not hasattr(weight, "main_grad"):
        raise ValueError("accumulate_into_main_grad: the weight has no main_grad")
    hidden = _all_tokens(hidden, sequence_parallel, tp_group).to(weight.dtype)
    if len(hidden) != len(target):
        raise ValueError(f"{len(hidden)} hidden states for {len(target)} targets")
    ref_hidden, ref_weight = _of_reference(reference, hidden, weight, sequence_parallel, tp_group)
    if positions is not None:
        hidden, target = hidden.index_select(0, positions), target.index_select(0, positions)
        ref_hidden = None if ref_hidden is None else ref_hidden.index_select(0, positions)
    tiling = Tiling.of(weight, len(target), vocab_size, tp_group, chunk_tokens, chunk_vocab)
    task = HeadTask(
        target, float(temperature), vocab_size, tiling, tp_group, accumulate_into_main_grad, exact_logits
    )
    return HeadOutput(*FusedHead.apply(hidden, weight, ref_hidden, ref_weight, task))


def _of_reference(reference, hidden, weight, sequence_parallel: bool, tp_group):
    """(hidden states, weight) of the reference without gradient; (None, None) if there is none. Raises ValueError for other
    shapes than those of the policy's."""
    if reference is None:
        return None, None
    with torch.no_grad():
        ref_weight = reference[1].detach()
        ref_hidden = _all_tokens(reference[0].detach(), sequence_parallel, tp_group).to(ref_weight.dtype)
    if ref_hidden.shape != hidden.shape or ref_weight.shape != weight.shape:
        raise ValueError(
            f"reference hidden states {list(ref_hidden.shape)} and weight {list(ref_weight.shape)} for"
            f" {list(hidden.shape)} and {list(weight.shape)}"
        )
    return ref_hidden, ref_weight


def _all_tokens(hidden, sequence_parallel: bool, group):
    """[t, h] on every TP rank; backward sums the ranks' gradients (each has those of its words)."""
    if sequence_parallel:
        return tensor_parallel.gather_from_sequence_parallel_region(
            hidden, tensor_parallel_output_grad=True, group=group
        )
    return tensor_parallel.copy_to_tensor_model_parallel_region(hidden, group=group)
