"""Head of a language model: computes log-prob, entropy and KL to a reference per token from hidden states.

Megatron's own output layer first computes all logits. Here `fused` computes the output projection together
with the log-probs, so a tensor of all logits, [t, vocabulary], never exists.
"""

from typing import NamedTuple

import torch
from megatron.core import tensor_parallel
from megatron.core.tensor_parallel import ColumnParallelLinear

from grpo_megatron.megatron.head.fused import FusedHead, HeadTask
from grpo_megatron.megatron.head.tiles import Tiling


class HiddenStatesOutput(ColumnParallelLinear):
    """Output layer of a language model that returns hidden states instead of logits.

    It keeps the parameters of Megatron's output layer and their names. The function `token_logprobs` computes
    log-probs from the hidden states and this layer's weight.
    """

    def forward(self, input_, weight=None, runtime_gather_output=None):
        return input_, None


def hand_out_hidden_states(model) -> None:
    """Make a GPTModel return hidden states [1, t, h] instead of logits.

    GPTModel constructs its output layer itself, so this function changes the class of the existing layer. The
    layer's parameter, names and sharded checkpoint state stay the same.
    """
    model.output_layer.__class__ = HiddenStatesOutput


class HeadOutput(NamedTuple):
    """Result of `token_logprobs`: log-prob, entropy and optionally the exact KL of each computed token.

    Each is a float32 tensor, equal on every TP rank. Logarithms are natural.
    """

    logp: torch.Tensor
    """Log-prob of the target token."""
    entropy: torch.Tensor
    """Entropy of the distribution p over the vocabulary."""
    kl: torch.Tensor | None
    """Exact KL to the reference's distribution q: sum_v p_v (log p_v - log q_v). None without a reference."""


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
    """Return each target token's log-prob, its distribution's entropy and, with a reference, the exact KL.

    A token's distribution is softmax(logits / temperature) over the vocabulary. It is computed in float32,
    whatever the dtype of the weight. The result can be differentiated once, with respect to hidden and
    weight. An output that the loss does not use costs nothing in the backward pass. All TP ranks must call
    this and compute the same loss from the result.

    hidden: last hidden states [t, h]; with sequence_parallel [t / tp, h], this TP rank's part.
    weight: [V_padded / tp, h], this rank's rows of the output projection (of the embedding if tied).
    target: int64 [t], ids below vocab_size. Any other id has log-prob NaN.
    reference: (hidden, weight) of the reference model, with the same shapes. They get no gradient. They must
        stay unchanged until the backward pass, which reads them again.
    chunk_tokens, chunk_vocab: maximum size of the tiles in which logits are computed. None: 8 MiB of float32
        logits and at most 1024 tokens on a CPU, 128 MiB and 4096 tokens on a GPU.
    accumulate_into_main_grad: if True, add the weight's gradient to `weight.main_grad` (DDP's buffer), as
        Megatron's gradient_accumulation_fusion does. `weight.grad` is then meaningless.
    exact_logits: if True, do not round logits to the weight's dtype. The gradient's products still use it.
    positions: int64 [n], indices of the tokens to compute. Outputs are then [n]. None: compute all t tokens.

    Raises ValueError if shapes do not match, if temperature or a chunk size is not positive, or if main_grad
    is missing.
    """
    if temperature <= 0:
        raise ValueError(f"temperature must be above 0, but is {temperature}")
    if accumulate_into_main_grad and not hasattr(weight, "main_grad"):
        raise ValueError(
            "accumulate_into_main_grad=True needs weight.main_grad, which only a parameter wrapped by DDP has"
        )
    hidden = _all_tokens(hidden, sequence_parallel, tp_group).to(weight.dtype)
    if len(hidden) != len(target):
        raise ValueError(f"there are {len(hidden)} hidden states for {len(target)} targets")
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
    """Return (hidden states of all t tokens, output weight) of the reference model, both detached.

    reference: (hidden, weight) of the reference model. Under sequence parallelism, hidden is this TP rank's
        part. None: return (None, None).
    hidden, weight: tensors of the policy, with hidden states of all t tokens.

    Raises ValueError if the shapes of the reference's tensors differ from those of the policy's.
    """
    if reference is None:
        return None, None
    with torch.no_grad():
        ref_weight = reference[1].detach()
        ref_hidden = _all_tokens(reference[0].detach(), sequence_parallel, tp_group).to(ref_weight.dtype)
    if ref_hidden.shape != hidden.shape or ref_weight.shape != weight.shape:
        raise ValueError(
            f"the reference's hidden states {list(ref_hidden.shape)} and weight {list(ref_weight.shape)} "
            f"differ in shape from the policy's {list(hidden.shape)} and {list(weight.shape)}"
        )
    return ref_hidden, ref_weight


def _all_tokens(hidden, sequence_parallel: bool, group):
    """Return the hidden states of all t tokens, [t, h], on every rank of a TP group.

    The backward pass adds up the gradients of all TP ranks, because each rank computes only the gradient
    through its own part of the vocabulary.

    hidden: [t, h]; with sequence_parallel [t / tp, h], this TP rank's part.
    """
    if sequence_parallel:
        return tensor_parallel.gather_from_sequence_parallel_region(
            hidden, tensor_parallel_output_grad=True, group=group
        )
    return tensor_parallel.copy_to_tensor_model_parallel_region(hidden, group=group)
