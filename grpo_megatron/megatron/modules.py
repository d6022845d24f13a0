"""Building blocks for Megatron's local layer spec besides attention: a norm that knows SP, the gated activation.

Megatron's own torch norm refuses sequence parallelism. Both also run on CUDA without TransformerEngine.
"""

import torch
import torch.nn.functional as F
from megatron.core.transformer.module import MegatronModule
from torch.autograd.function import once_differentiable


class RMSNorm(torch.nn.RMSNorm):
    """Constructed the way Megatron's layer specs construct norms."""

    def __init__(self, config, hidden_size: int, eps: float = 1e-5, **unused):
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype, device=device)
        # Under SP each TP rank sees other tokens: finalize_model_grads sums marked gradients over TP.
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., hidden_size] -> the same shape and dtype."""
        if x.is_cpu and x.dtype == torch.float32:
            return _FloatRMSNorm.apply(x, self.weight, self.eps)
        return super().forward(x)


class _FloatRMSNorm(torch.autograd.Function):
    """torch's rms_norm is no kernel of its own on a CPU but a chain of operations; this chain is shorter."""

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
    """silu(x[..., :f]) * x[..., f:], [..., 2f] -> [..., f] (Shazeer 2020, arXiv:2002.05202)."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _SwiGLU.apply(x)


class _SwiGLU(torch.autograd.Function):
    """Megatron adds an offset of zero, keeps that copy too, and its backward puts the halves of the gradient together."""

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
