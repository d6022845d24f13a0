"""TransformerEngine 2.11 on a CPU: its own Python code, with its compiled kernels emulated in torch.

With megatron.emulate_kernels, FP8 training and TransformerEngine's layers can be tested without a GPU.
Modules, autograd functions, quantizers, FP8 tensors, recipes, the caching of FP8 weights, the choice of an
attention backend, ring attention, recomputation and the fused optimizer's bookkeeping are TransformerEngine's
own. Its wheel is pure Python and is unpacked outside the Python environment. If it were installed there
without its compiled library, importing Megatron would fail.

The emulation computes the same values as the kernels, up to the order of summation. Its speed and memory say
nothing about a GPU.
"""

import ast
import os
import sys
import types
import warnings

import torch

from grpo_megatron.capabilities import emulated_transformer_engine
from grpo_megatron.errors import UserError
from grpo_megatron.megatron.without_gpu import patches
from grpo_megatron.megatron.without_gpu.emulation import layers, packed_attention, quantization
from grpo_megatron.megatron.without_gpu.emulation.extension import Extension, MissingModule
from grpo_megatron.megatron.without_gpu.import_hook import changes

_KERNELS = {
    quantization: "quantize split_quantize dequantize fp8_transpose bgrad_quantize "
    "fused_amax_and_scale_update_after_reduction",
    layers: "generic_gemm te_general_grouped_gemm rmsnorm_fwd rmsnorm_bwd fused_rope_forward "
    "fused_rope_backward fused_multi_row_padding fused_multi_row_unpadding multi_tensor_l2norm "
    "multi_tensor_scale multi_tensor_adam",
    packed_attention: "get_fused_attn_backend fused_attn_fwd fused_attn_bwd thd_read_half_tensor "
    "thd_get_partitioned_indices thd_second_half_lse_correction thd_read_second_half_lse "
    "thd_out_correction thd_grad_correction",
}


class _Hopper(patches.CpuCuda):
    """Replacement for ``torch.cuda`` inside Megatron and TransformerEngine that reports a Hopper GPU.

    TransformerEngine then takes the code paths for a Hopper GPU, although it runs on a CPU.
    """

    @staticmethod
    def is_available():
        return True

    @staticmethod
    def get_device_capability(device=None):
        return 9, 0

    @staticmethod
    def get_device_properties(device=None):
        return types.SimpleNamespace(
            major=9, minor=0, multi_processor_count=132, name="emulated Hopper", total_memory=80 * 2**30
        )

    @staticmethod
    def is_current_stream_capturing():
        return False


class _ToCpu(patches.CudaToCpu):
    """Syntax tree transformer that makes a TransformerEngine module use the CPU instead of CUDA.

    Its base class rewrites what Megatron uses. This class also rewrites expressions that occur only in
    TransformerEngine.
    """

    def visit_Constant(self, node):
        if node.value == "cuda":
            node.value = "cpu"
        return super().visit_Constant(node)

    def visit_Attribute(self, node):
        if node.attr == "is_cuda":
            return ast.copy_location(ast.Constant(True), node)
        if node.attr == "_coalescing_manager":
            return ast.copy_location(ast.Name("__coalesced__", node.ctx), node)
        return super().visit_Attribute(node)


def _mend_distributed(module):
    module._get_cuda_rng_state = lambda device="cuda", clone=False, graph_safe=True: torch.get_rng_state()
    module._set_cuda_rng_state = lambda state, device=-1, graph_safe=True: torch.set_rng_state(state)


def _mend_context_parallel(module):
    def flash_attn_p2p_communicate(rank, send, send_to, receive, receive_from, group, batched):
        # NCCL matches messages by their order, gloo by tags. With several messages in flight at once, the
        # backward pass would never end on gloo.
        for work in [
            torch.distributed.isend(send.contiguous(), send_to, group),
            torch.distributed.irecv(receive, receive_from, group),
        ]:
            work.wait()
        return []

    module.flash_attn_p2p_communicate = flash_attn_p2p_communicate


def _mend_cpp_extensions(module):
    # This module copies only the names in the extension's __all__, but other names are read from it too.
    module.__getattr__ = sys.modules["transformer_engine_torch"].__getattr__


def _mend_quantization(module):
    # The answer is that of a Hopper GPU. The real function would ask for the CUDA version of the build.
    module.check_fp8_block_scaling_support = lambda: (True, "")


def install() -> None:
    """Make ``transformer_engine`` importable in this process, with its compiled kernels emulated in torch.

    Call this before the first import of Megatron. The function also installs the patches that let Megatron
    run without CUDA (`patches.install`). A second call does nothing.

    Raises UserError if the emulation is impossible on this machine, for example because the machine has CUDA,
    or because TransformerEngine's wheel is not unpacked. Raises RuntimeError if Megatron is imported already.
    """
    if "transformer_engine_torch" in sys.modules and isinstance(
        sys.modules["transformer_engine_torch"], Extension
    ):
        return
    folder, problem = emulated_transformer_engine()
    if problem:
        raise UserError(f"megatron.emulate_kernels=true cannot be used on this machine: {problem}")
    patches.install()
    patches.must_be_new("megatron.core.")
    os.environ["NVTE_PROJECT_BUILDING"] = "1"  # TransformerEngine then loads no library
    sys.path.append(str(folder))
    ours = changes()
    ours.rewriters["transformer_engine."] = _ToCpu
    ours.names |= {"__cpu_cuda__": _Hopper(), "__coalesced__": patches.NoOp}
    pytorch = "transformer_engine.pytorch"
    ours.mend |= {
        f"{pytorch}.distributed": [_mend_distributed],
        f"{pytorch}.attention.dot_product_attention.context_parallel": [_mend_context_parallel],
        f"{pytorch}.cpp_extensions": [_mend_cpp_extensions],
        f"{pytorch}.quantization": [_mend_quantization],
    }
    Extension({name: getattr(module, name) for module, names in _KERNELS.items() for name in names.split()})
    MissingModule(f"{pytorch}.onnx_extensions")  # the real one would import the onnxscript package
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import transformer_engine.common

        transformer_engine.common.load_framework_extension = lambda framework: None
        import transformer_engine.pytorch

        transformer_engine.pytorch = sys.modules["transformer_engine.pytorch"]
