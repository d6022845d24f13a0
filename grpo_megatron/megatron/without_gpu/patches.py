"""Patches with which Megatron runs without CUDA, and with CUDA but without TransformerEngine.

They are written for megatron-core 0.16.1 and 0.19.2.

``install()`` must run before the first ``megatron`` import. Without CUDA it

1. rewrites ``megatron.*`` modules as they load, so that ``torch.cuda``, ``.cuda()``, ``device="cuda"`` and
   pinned memory mean the CPU *inside Megatron only*. Patching torch itself would be shorter, but it changes
   ``Tensor.type`` and the factory functions for every library in the process;
2. replaces the few functions that no rewriting can fix, as their modules load.

If TransformerEngine is absent, with CUDA or without, it also adds what Megatron then lacks, see `without_te`.
"""

import ast
import contextlib
import os
import sys
import types

import torch

from grpo_megatron.megatron.without_gpu import without_te
from grpo_megatron.megatron.without_gpu.import_hook import changes

_CPU = torch.device("cpu")
_CUDA_TENSOR_TYPES = ("torch.cuda.FloatTensor", "torch.cuda.HalfTensor", "torch.cuda.BFloat16Tensor")


class NoOp:
    """Replacement for streams, events and NVTX ranges on a CPU, which works in program order.

    Every method does nothing and returns the object, which is also a context manager.
    """

    def __init__(self, *args, **kwargs):
        pass

    def __getattr__(self, name):
        return lambda *args, **kwargs: self

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        return False


class CpuCuda(types.ModuleType):
    """Replacement for ``torch.cuda`` inside Megatron on a machine without CUDA.

    Rewritten modules use this object in place of torch.cuda. A name that it does not define is looked up in
    the real torch.cuda.
    """

    Stream = Event = NoOp
    nvtx = NoOp()

    def __init__(self):
        super().__init__("torch.cuda on CPU")
        self.random = self

    @staticmethod
    def current_device():
        return _CPU

    @staticmethod
    def set_device(device):
        pass

    @staticmethod
    def device_count():
        return 1

    @staticmethod
    def synchronize(device=None):
        pass

    @staticmethod
    def empty_cache():
        pass

    @staticmethod
    def current_stream(device=None):
        return NoOp()

    default_stream = current_stream

    @staticmethod
    def stream(stream):
        return contextlib.nullcontext()

    @staticmethod
    def get_rng_state(device=None):
        return torch.get_rng_state()

    @staticmethod
    def set_rng_state(state, device=None):
        torch.set_rng_state(state)

    @staticmethod
    def manual_seed(seed):
        torch.default_generator.manual_seed(seed)

    def __getattr__(self, name):
        return getattr(torch.cuda, name)


def _is_name(node, name):
    return isinstance(node, ast.Name) and node.id == name


class CudaToCpu(ast.NodeTransformer):
    """Syntax tree transformer that makes a Megatron module use the CPU instead of CUDA."""

    def visit_Call(self, node):
        func = node.func
        if isinstance(func, ast.Attribute) and func.attr == "cuda" and not _is_name(func.value, "torch"):
            return self.visit(func.value)  # x.cuda(...) -> x
        is_device = (
            isinstance(func, ast.Attribute) and func.attr == "device" and _is_name(func.value, "torch")
        )
        if (
            is_device
            and node.args
            and isinstance(node.args[0], ast.Constant)
            and node.args[0].value == "cuda"
        ):
            node.args = [ast.copy_location(ast.Constant("cpu"), node)]  # drops the device index too
        return self.generic_visit(node)

    def visit_keyword(self, node):
        value = node.value
        if isinstance(value, ast.Constant):
            if node.arg == "device" and value.value == "cuda":
                value.value = "cpu"
            if node.arg == "pin_memory" and value.value is True:
                value.value = False
        return self.generic_visit(node)

    def visit_Constant(self, node):
        if node.value in _CUDA_TENSOR_TYPES:
            node.value = node.value.replace(".cuda", "")
        return node

    def visit_Attribute(self, node):
        if node.attr == "cuda" and _is_name(node.value, "torch"):
            return ast.copy_location(ast.Name("__cpu_cuda__", node.ctx), node)
        return self.generic_visit(node)


def _patch_rng(module):
    module._set_cuda_rng_state = lambda state, device=-1, graph_safe=False: torch.set_rng_state(state)
    module._get_cuda_rng_state = lambda device="cuda", clone=False, graph_safe=False: torch.get_rng_state()


def _patch_token_dispatcher(module):
    def maybe_move_tensor_to_cpu(tensor, as_numpy=False, record_stream=False):
        return tensor.numpy() if torch.is_tensor(tensor) and as_numpy else tensor

    module.maybe_move_tensor_to_cpu = maybe_move_tensor_to_cpu


def _patch_mappings(module):
    gather, reduce_scatter = module._gather_along_first_dim, module._reduce_scatter_along_first_dim

    def gather_unequal(input_, group, output_split_sizes=None, use_global_buffer=False):
        if output_split_sizes is None or group.size() == 1:
            return gather(input_, group, output_split_sizes, use_global_buffer)
        # gloo gathers only parts of equal size.
        padded = input_.new_zeros(max(output_split_sizes), *input_.shape[1:])
        padded[: len(input_)] = input_
        parts = [torch.empty_like(padded) for _ in output_split_sizes]
        torch.distributed.all_gather(parts, padded, group=group)
        return torch.cat([part[:size] for part, size in zip(parts, output_split_sizes, strict=True)])

    def reduce_scatter_unequal(input_, group, input_split_sizes=None, use_global_buffer=False):
        if input_split_sizes is None or group.size() == 1:
            return reduce_scatter(input_, group, input_split_sizes, use_global_buffer)
        total = input_.clone(memory_format=torch.contiguous_format)
        torch.distributed.all_reduce(total, group=group)
        return total.split(input_split_sizes)[group.rank()].contiguous()

    module._gather_along_first_dim = gather_unequal
    module._reduce_scatter_along_first_dim = reduce_scatter_unequal


def install() -> None:
    """Register the patches that Megatron needs on this machine. They are applied when Megatron is imported.

    On a machine without CUDA, the patches make Megatron use the CPU instead of torch.cuda, and this function
    sets the environment variable TORCHDYNAMO_DISABLE, which turns torch.compile off in this process. A second
    call does nothing.

    Raises RuntimeError if Megatron is imported already, because patches would then have no effect.
    """
    ours = changes()
    if ours.mend:
        return
    must_be_new("megatron.core.")
    ours.mend |= without_te.MEND
    if torch.cuda.is_available():
        return
    # On a CPU, Megatron's jit-compiled helpers would start the inductor (a C++ compiler).
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    ours.rewriters["megatron."] = CudaToCpu
    ours.names["__cpu_cuda__"] = CpuCuda()
    ours.mend["megatron.core.tensor_parallel.random"] = [_patch_rng]
    ours.mend["megatron.core.tensor_parallel.mappings"] = [_patch_mappings]
    ours.mend["megatron.core.transformer.moe.token_dispatcher"] = [_patch_token_dispatcher]


def must_be_new(prefix: str) -> None:
    """Raise RuntimeError if a module whose name starts with `prefix` is imported already.

    Patches change a module while it is imported, so patching it later would have no effect.
    """
    loaded = next((name for name in sys.modules if name.startswith(prefix)), None)
    if loaded:
        raise RuntimeError(
            f"{loaded} was imported before its patches were installed; install them before it is imported"
        )
