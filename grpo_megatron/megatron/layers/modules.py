"""Norm and activation for Megatron's local layers, which are used without TransformerEngine.

The norm replaces Megatron's torch norm, which refuses sequence parallelism. The activation replaces
Megatron's because it copies less.
"""

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import RowParallelLinear
from megatron.core.transformer.module import MegatronModule
from torch.autograd.function import once_differentiable

from grpo_megatron.model.architecture import SWIGLU_ALPHA


class RMSNorm(torch.nn.RMSNorm):
    """RMS norm whose constructor takes the arguments that Megatron passes to a layer's norm.

    It multiplies by the weight, or by 1 + weight in models with zero-centred norms.
    """

    def __init__(self, config, hidden_size: int, eps: float = 1e-5, **unused):
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype, device=device)
        # Under SP each TP rank sees different tokens: finalize_model_grads sums marked gradients over TP.
        self.weight.sequence_parallel = config.sequence_parallel
        self.zero_centred = config.layernorm_zero_centered_gamma

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x [..., hidden_size], normalised. Shape and dtype do not change."""
        # In bf16, 1 + weight would lose most digits of the weight.
        weight = 1 + self.weight.float() if self.zero_centred else self.weight
        if x.is_cpu and x.dtype == torch.float32:
            return _FloatRMSNorm.apply(x, weight, self.eps)
        if self.zero_centred:
            return F.rms_norm(x.float(), self.normalized_shape, weight, self.eps).to(x.dtype)
        return super().forward(x)


class _FloatRMSNorm(torch.autograd.Function):
    """Autograd function of the RMS norm for float32 tensors on a CPU.

    It is faster than torch's rms_norm, which takes more operations on a CPU.
    """

    @staticmethod
    def forward(ctx, x, weight, eps):
        scale = (
            torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        )
        ctx.save_for_backward(x, weight, scale)
        return (x * scale).mul_(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        x, weight, scale = ctx.saved_tensors
        normed = x * scale
        product = grad * normed
        grad_weight = product.flatten(0, -2).sum(0)
        along = (product @ weight).unsqueeze(-1).div_(x.shape[-1])
        grad_x = (grad * weight).sub_(normed.mul_(along)).mul_(scale)
        return grad_x, grad_weight, None


class SwiGLU(MegatronModule):
    """SwiGLU activation: silu of the first half of the channels, times the second half (arXiv:2002.05202).

    forward: takes x [..., 2f], returns silu(x[..., :f]) * x[..., f:], shape [..., f].
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _SwiGLU.apply(x)


class _SwiGLU(torch.autograd.Function):
    """Autograd function of SwiGLU that makes fewer copies than Megatron's version.

    Megatron's version also adds an offset of zero to the second half, saves this copy for the backward pass,
    and concatenates the two halves of the gradient.
    """

    @staticmethod
    def forward(ctx, x):
        gate, up = x.chunk(2, dim=-1)
        activated = F.silu(gate)
        ctx.save_for_backward(x, activated)
        return activated * up

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        x, activated = ctx.saved_tensors
        gate, up = x.chunk(2, dim=-1)
        grad_x = torch.empty_like(x)
        of_gate, of_up = grad_x.chunk(2, dim=-1)
        torch.ops.aten.silu_backward.grad_input(grad * up, gate, grad_input=of_gate)
        torch.mul(grad, activated, out=of_up)
        return grad_x


class GeGLU(MegatronModule):
    """Activation of Gemma's MLPs: GELU of the first half of the channels, times the second half.

    forward: takes x [..., 2f], returns gelu(x[..., :f]) * x[..., f:], shape [..., f]. GELU is approximated
        with a tanh (arXiv:1606.08415).
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = x.chunk(2, dim=-1)
        return F.gelu(gate, approximate="tanh") * up


class NormOfOutput:
    """RMS norm of the output of a row-parallel linear layer, for Gemma 3's attention and MLP.

    A class that derives from this class and from such a layer has the norm as its attribute `norm`. The
    layer must return the sum over all TP ranks, and have no bias.
    """

    def __init__(self, input_size: int, output_size: int, *, config, **other):
        super().__init__(input_size, output_size, config=config, **other)
        self.norm = RMSNorm(config, output_size, eps=config.layernorm_epsilon)

    def forward(self, input_: torch.Tensor) -> tuple[torch.Tensor, None]:
        output, _ = super().forward(input_)
        return self.norm(output), None


class NormedRows(NormOfOutput, RowParallelLinear):
    """Row-parallel linear layer with an RMS norm of its output."""


class WholeRows(RowParallelLinear):
    """Down projection of an expert with a bias. A rank has the whole expert, so there is no sum over ranks.

    Megatron's class fails in three ways. On a single rank, its output is a view, to which autograd does not
    allow Megatron's MLP to add the bias in place. Under SP it marks the bias, so that the gradients of
    different experts on the TP ranks would be added up. And only the first TP rank would count the bias in
    the norm of the gradient.
    """

    def __init__(self, *positional, **named):
        super().__init__(*positional, **named)
        self.explicit_expert_comm = True  # Megatron's setting for sums that other modules make
        self.bias.sequence_parallel, self.bias.tensor_model_parallel = False, True


class ClampedSwiGLU(MegatronModule):
    """Activation of gpt-oss's experts (arXiv:2508.10925): SwiGLU with limits, and with up + 1 in place of up.

    forward: takes x [..., 2f], the outputs g = x[..., :f] of the gate projection and u = x[..., f:] of the up
        projection. Returns g * sigmoid(1.702 * g) * (u + 1), shape [..., f], with g limited to at most L and
        u to the range from -L to L. L is the TransformerConfig's activation_func_clamp_value.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _ClampedSwiGLU.apply(x, self.config.activation_func_clamp_value)


class _ClampedSwiGLU(torch.autograd.Function):
    """Autograd function of ClampedSwiGLU that saves only its input for the backward pass."""

    @staticmethod
    def forward(ctx, x, limit):
        ctx.save_for_backward(x)
        ctx.limit = limit
        gate, up = _limited(x, limit)
        return gate * torch.sigmoid(SWIGLU_ALPHA * gate) * (up + 1)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        gate, up = _limited(x, ctx.limit)
        share = torch.sigmoid(SWIGLU_ALPHA * gate)
        slope = share * (1 + SWIGLU_ALPHA * gate * (1 - share))
        of_gate, of_up = grad * (up + 1) * slope, grad * gate * share
        given_gate, given_up = x.chunk(2, dim=-1)
        of_gate.masked_fill_(given_gate > ctx.limit, 0)
        of_up.masked_fill_(given_up.abs() > ctx.limit, 0)
        return torch.cat([of_gate, of_up], dim=-1), None


def _limited(x: torch.Tensor, limit: float) -> tuple[torch.Tensor, torch.Tensor]:
    gate, up = x.chunk(2, dim=-1)
    return gate.clamp(max=limit), up.clamp(-limit, limit)
