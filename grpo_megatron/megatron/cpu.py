"""Lets megatron-core 0.16.1 run where there is no CUDA. The only module that knows it can.

``install()`` must run before the first ``megatron`` import. With CUDA present it does nothing.
Without, it

1. adds an import hook that rewrites ``megatron.*`` modules as they load, so that ``torch.cuda``,
   ``.cuda()``, ``device="cuda"`` and pinned memory mean the CPU *inside Megatron only*. Patching
   torch itself is shorter, but it changes ``Tensor.type`` and the factory functions for every
   library in the process;
2. replaces, as their modules load, the few functions that no rewriting can mend;
3. gives Megatron an Adam whose state has the shape of the fused ones, which its checkpoint code
   assumes (``step`` in the parameter group). Stock ``torch.optim.AdamW`` states cannot be loaded
   into a fresh distributed optimizer.
"""

import ast
import contextlib
import importlib.abc
import importlib.machinery
import os
import sys
import types

import torch

_CPU = torch.device("cpu")
_CUDA_TENSOR_TYPES = ("torch.cuda.FloatTensor", "torch.cuda.HalfTensor", "torch.cuda.BFloat16Tensor")


class _Stream:
    """Everything on the CPU happens in program order, so waiting is never needed."""

    def __init__(self, *args, **kwargs):
        pass

    def wait_stream(self, stream):
        pass

    def wait_event(self, event):
        pass

    def synchronize(self):
        pass

    def record_event(self, event=None):
        return event or _Event()

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        return False


class _Event:
    def __init__(self, *args, **kwargs):
        pass

    def record(self, *args):
        pass

    def wait(self, *args):
        pass

    def synchronize(self):
        pass

    def query(self):
        return True

    def elapsed_time(self, end):
        raise RuntimeError("CUDA events carry no time on CPU; use time.perf_counter()")


class _Nvtx:
    def __getattr__(self, name):
        return lambda *args, **kwargs: None


class _CpuCuda(types.ModuleType):
    """What ``torch.cuda`` means inside rewritten modules; unknown names fall through to torch."""

    Stream = _Stream
    Event = _Event
    nvtx = _Nvtx()

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
        return _Stream()

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


class _CudaToCpu(ast.NodeTransformer):
    """Rewrites the syntax tree of one Megatron module."""

    def visit_Call(self, node):
        func = node.func
        if isinstance(func, ast.Attribute) and func.attr == "cuda" and not _is_name(func.value, "torch"):
            return self.visit(func.value)  # x.cuda(...) -> x
        is_device = isinstance(func, ast.Attribute) and func.attr == "device" and _is_name(func.value, "torch")
        if is_device and node.args and isinstance(node.args[0], ast.Constant) and node.args[0].value == "cuda":
            node.args = [ast.copy_location(ast.Constant("cpu"), node)]  # the index goes too
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


class _Loader(importlib.machinery.SourceFileLoader):
    def get_code(self, fullname):
        source = self.get_data(self.path)
        if b"cuda" not in source:
            return super().get_code(fullname)
        tree = ast.fix_missing_locations(_CudaToCpu().visit(ast.parse(source, self.path)))
        return compile(tree, self.path, "exec", dont_inherit=True)

    def exec_module(self, module):
        module.__dict__["__cpu_cuda__"] = _CpuCuda()
        super().exec_module(module)
        if module.__name__ in _AFTER_LOAD:
            _AFTER_LOAD[module.__name__](module)


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, fullname, path, target=None):
        if not fullname.startswith("megatron."):
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        if spec is not None and type(spec.loader) is importlib.machinery.SourceFileLoader:
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


class CpuAdam(torch.optim.Optimizer):
    """Adam/AdamW with the interface and state layout of TransformerEngine's and apex's FusedAdam.

    Kingma & Ba 2015; Loshchilov & Hutter 2019 (decoupled decay) with ``adam_w_mode``. The step
    counter lives in the parameter group, the moments (float32, shape of the parameter) in
    ``state[p]["exp_avg"]`` and ``["exp_avg_sq"]``.
    """

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, adam_w_mode=True, **unknown):
        if unknown:
            raise TypeError(f"CpuAdam does not know {sorted(unknown)}")
        self.adam_w_mode = adam_w_mode
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "bias_correction": True})

    @torch.no_grad()
    def step(self, closure=None):
        from torch.optim._functional import adam, adamw

        update = adamw if self.adam_w_mode else adam
        for group in self.param_groups:
            if not group["params"]:
                continue
            group["step"] = group.get("step", 0) + 1
            params = [p for p in group["params"] if p.grad is not None]
            for p in params:
                if not self.state[p]:
                    self.state[p].update(exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
            update(
                params,
                [p.grad for p in params],
                [self.state[p]["exp_avg"] for p in params],
                [self.state[p]["exp_avg_sq"] for p in params],
                [],
                # torch's function adds one to each counter itself
                [torch.tensor(float(group["step"] - 1)) for _ in params],
                foreach=True,
                amsgrad=False,
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=False,
            )


def _patch_rng(module):
    module._set_cuda_rng_state = lambda state, device=-1, graph_safe=False: torch.set_rng_state(state)
    module._get_cuda_rng_state = lambda device="cuda", clone=False, graph_safe=False: torch.get_rng_state()


def _patch_moe_utils(module):
    # Undefined without TransformerEngine in 0.16.1: a NameError at the first router forward.
    if not hasattr(module, "te_general_gemm"):
        module.te_general_gemm = None


def _patch_token_dispatcher(module):
    def maybe_move_tensor_to_cpu(tensor, as_numpy=False, record_stream=False):
        return tensor.numpy() if torch.is_tensor(tensor) and as_numpy else tensor

    module.maybe_move_tensor_to_cpu = maybe_move_tensor_to_cpu


def _patch_optimizer(module):
    module.Adam = CpuAdam
    module.USING_PYTORCH_OPTIMIZER = False


def _patch_distributed_optimizer(module):
    module.Adam = CpuAdam
    module.HAVE_APEX_OR_TE = True
    module.USING_TE_OPTIMIZER = True


_AFTER_LOAD = {
    "megatron.core.tensor_parallel.random": _patch_rng,
    "megatron.core.transformer.moe.moe_utils": _patch_moe_utils,
    "megatron.core.transformer.moe.token_dispatcher": _patch_token_dispatcher,
    "megatron.core.optimizer": _patch_optimizer,
    "megatron.core.optimizer.distrib_optimizer": _patch_distributed_optimizer,
}


def install() -> bool:
    """Prepare this process for Megatron; returns True where the CPU platform is in use.

    Raises RuntimeError if Megatron was imported before (its modules are then already bound to
    ``torch.cuda``).
    """
    if torch.cuda.is_available():
        return False
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return True
    loaded = [name for name in sys.modules if name.startswith("megatron.core.")]
    if loaded:
        raise RuntimeError(f"grpo_megatron.megatron.cpu.install() came after {loaded[0]} was imported")
    # jit-compiled helpers of Megatron would start the inductor (a C++ compiler) on CPU.
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    sys.meta_path.insert(0, _Finder())
    return True
