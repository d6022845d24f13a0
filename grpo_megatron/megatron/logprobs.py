"""The head: hidden states in, log-prob and entropy per token out. It owns the output projection.

Megatron's own post-processing turns hidden states into logits first and always; here the
projection is part of the function, so that it can be fused, chunked and recomputed.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.tensor_parallel import ColumnParallelLinear

# Stands for "impossible" in padded vocabulary columns. Minus infinity would give 0 * inf = NaN.
_NEVER = -1e30


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


def token_logprobs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    temperature: float,
    vocab_size: int,
    tp_group,
    sequence_parallel: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-prob of each target and entropy of each distribution; both float32 [t], natural log.

    hidden [t, h] (with sequence_parallel [t / tp, h], this rank's part); weight [V_padded / tp, h],
    this rank's rows of the output projection (the embedding if tied); target int64 [t], any id
    below vocab_size. Distributions are softmax(logits / temperature), in float32 whatever the
    weights' dtype. Differentiable in hidden and weight; every TP rank returns the same values and
    must compute the same loss from them.
    """
    if sequence_parallel:
        hidden = tensor_parallel.gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=True, group=tp_group)
    else:
        hidden = tensor_parallel.copy_to_tensor_model_parallel_region(hidden, group=tp_group)
    logits = F.linear(hidden.to(weight.dtype), weight).float()
    if temperature != 1.0:
        logits = logits / temperature
    start = weight.shape[0] * tp_group.rank()
    if start + weight.shape[0] > vocab_size:
        padding = torch.arange(start, start + weight.shape[0], device=logits.device) >= vocab_size
        logits = logits.masked_fill(padding, _NEVER)
    return _VocabParallelLogprob.apply(logits, target, start, tp_group)


class _VocabParallelLogprob(torch.autograd.Function):
    """Log-softmax at the target, and entropy, of logits split over TP along the vocabulary.

    With z = logits - max, Z = sum exp z, p = exp(z) / Z:
        logp = z_target - log Z            d logp / dz_j = [j = target] - p_j
        H    = log Z - sum p z             d H    / dz_j = -p_j (z_j - log Z + H)
    """

    @staticmethod
    def forward(ctx, logits, target, start, group):
        ctx.set_materialize_grads(False)  # an output the loss does not use costs nothing backward

        def reduce(tensor, op):
            if group.size() > 1:
                dist.all_reduce(tensor, op=op, group=group)
            return tensor

        maximum = reduce(logits.max(dim=-1).values, dist.ReduceOp.MAX)
        z = logits - maximum[:, None]
        exp = z.exp()
        own = (target >= start) & (target < start + logits.shape[1])
        column = torch.where(own, target - start, 0)
        z_target = torch.where(own, z.gather(1, column[:, None])[:, 0], 0.0)
        # One collective for all three sums.
        sums = reduce(torch.stack([exp.sum(dim=-1), (exp * z).sum(dim=-1), z_target]), dist.ReduceOp.SUM)
        log_sum = sums[0].log()
        entropy = log_sum - sums[1] / sums[0]
        probabilities = exp.div_(sums[0][:, None])
        ctx.save_for_backward(probabilities, z, log_sum, entropy, own, column)
        return sums[2] - log_sum, entropy

    @staticmethod
    def backward(ctx, grad_logp, grad_entropy):
        probabilities, z, log_sum, entropy, own, column = ctx.saved_tensors
        grad = torch.zeros_like(probabilities)
        if grad_logp is not None:
            grad = -probabilities * grad_logp[:, None]
            grad.scatter_add_(1, column[:, None], torch.where(own, grad_logp, 0.0)[:, None])
        if grad_entropy is not None:
            grad -= probabilities * (z - log_sum[:, None] + entropy[:, None]) * grad_entropy[:, None]
        return grad, None, None, None
