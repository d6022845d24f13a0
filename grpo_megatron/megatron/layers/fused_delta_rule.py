"""Fused kernels for gated delta networks on GPUs, from the library flash-linear-attention.

Each function takes the same arguments as the function of this name in `delta_rule`, and computes the same.
SGLang's engines have a copy of these kernels.

Written for fla-core 0.6.0.
"""

import logging
from functools import cache
from importlib.util import find_spec

import torch

from grpo_megatron.megatron.layers.delta_rule import Chunks

logger = logging.getLogger(__name__)


def fits(x: torch.Tensor) -> bool:
    """Return True if the fused kernels should be used for inputs like `x`.

    They are used on GPUs in bf16 and float16. In float32, their matrix products would be in TF32.
    """
    return x.is_cuda and x.dtype in (torch.bfloat16, torch.float16) and _is_installed()


@cache
def _is_installed() -> bool:
    found = find_spec("fla") is not None
    if not found:
        logger.warning(
            "PyTorch's operators compute gated delta networks, which is slower than fused kernels; install "
            "fla-core for these"
        )
    return found


def gated_delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    log_decay: torch.Tensor,
    beta: torch.Tensor,
    chunks: Chunks,
) -> torch.Tensor:
    """Return the outputs of the gated delta rule for all tokens of a pack. See `delta_rule.gated_delta_rule`.

    The kernels round the inputs of matrix products to the dtype of the values, and sum up in float32.
    """
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    one_batch = (x.contiguous()[None] for x in (query, key, value, log_decay, beta))
    output, _ = chunk_gated_delta_rule(
        *one_batch,
        use_qk_l2norm_in_kernel=True,
        cu_seqlens=chunks.cu_seqlens,
        cu_seqlens_cpu=chunks.cu_seqlens_cpu,
    )
    return output[0]


def causal_convolution(x: torch.Tensor, weight: torch.Tensor, chunks: Chunks) -> torch.Tensor:
    """Convolve each channel over the tokens of its sequence. See `delta_rule.causal_convolution`."""
    from fla.modules.causal_conv1d import causal_conv1d

    convolved, _ = causal_conv1d(
        x.contiguous()[None],
        weight.contiguous(),
        activation="silu",
        cu_seqlens=chunks.cu_seqlens,
        cu_seqlens_cpu=chunks.cu_seqlens_cpu,
    )
    return convolved[0]
