"""Print which settings the GPU stack's SGLang would choose for engines on H100s, without a GPU.

tools/engine_settings.py starts this program. It reads a list of {"arguments": ..., "environment": ...} as
JSON from standard input, and writes a list of {name of a setting: value} as JSON. Before SGLang is imported,
torch is patched to report eight H100s, and SGLang's compiled packages are replaced by mocks. No kernel is
loaded and no engine is started.
"""

import importlib.abc
import importlib.machinery
import json
import os
import sys
import types
from unittest import mock

import torch
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

# Compiled packages of the GPU stack that SGLang imports if CUDA is available.
_COMPILED = {
    "sgl_kernel",
    "flashinfer",
    "deep_gemm",
    "torch_memory_saver",
    "flash_attn",
    "cutlass",
    "tilelang",
    "deep_ep",
}
_MIB = 2**20
_MEMORY = 81559 * _MIB  # what nvidia-smi reports for an H100 with 80 GB
_ENVIRONMENT = (
    "NCCL_CUMEM_ENABLE",
    "NCCL_NVLS_ENABLE",
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "SGLANG_JIT_DEEPGEMM_FAST_WARMUP",
)


class _Compiled(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Import hook that replaces SGLang's compiled packages by mocks, so that SGLang loads without CUDA."""

    def find_spec(self, name, path=None, target=None):
        return (
            importlib.machinery.ModuleSpec(name, self, is_package=True)
            if name.partition(".")[0] in _COMPILED
            else None
        )

    def create_module(self, spec):
        module = types.ModuleType(spec.name)
        module.__version__ = "0"
        module.__getattr__ = lambda name: _absent(name)
        return module

    def exec_module(self, module):
        pass


def _absent(name: str):
    if name.startswith("__"):
        raise AttributeError(name)
    return mock.MagicMock(name=name)


def fake_devices() -> None:
    """Make torch report a node of eight H100s with CUDA 13, so that SGLang decides as on such a node.

    This also installs the import hook for compiled packages, and lets SGLang register model types that
    transformers already has.
    """
    properties = types.SimpleNamespace(
        name="NVIDIA H100 80GB HBM3",
        major=9,
        minor=0,
        total_memory=_MEMORY,
        multi_processor_count=132,
        shared_memory_per_block_optin=232448,
    )
    torch.version.cuda = "13.0"
    answers = {
        "is_available": True,
        "device_count": 8,
        "current_device": 0,
        "get_device_capability": (9, 0),
        "get_device_name": properties.name,
        "get_device_properties": properties,
        "mem_get_info": (_MEMORY, _MEMORY),
        "get_arch_list": ["sm_90"],
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, lambda *_, answer=answer, **__: answer)
    sys.meta_path.insert(0, _Compiled())
    # This SGLang registers model types that the newer transformers of the CPU stack already has.
    register = CONFIG_MAPPING.register
    CONFIG_MAPPING.register = lambda key, value, exist_ok=False: register(key, value, exist_ok=True)


def resolve(arguments: dict, environment: dict[str, str]) -> dict:
    """Return {name: value} of SGLang's decisions for an engine, such as its attention backend.

    The environment variables in _ENVIRONMENT are included; None if one is not set.

    arguments: arguments of SGLang's ServerArgs.
    environment: environment variables of the engine's process, before SGLang changes them.
    """
    from sglang.srt.entrypoints import engine
    from sglang.srt.server_args import ServerArgs

    with (
        mock.patch.dict(os.environ, environment, clear=True),
        mock.patch.object(engine, "assert_pkg_version"),
    ):
        found = ServerArgs(**arguments)
        engine._set_envs_and_config(found)
        variables = {name: os.environ.get(name) for name in _ENVIRONMENT}
        products = (
            fp8_products(found)
            if "quantization_config" in (arguments.get("json_model_override_args") or "")
            else None
        )
    graphs = found.cuda_graph_config
    prefill, decode = found.get_attention_backends()
    return variables | {
        "attention": prefill if prefill == decode else f"{prefill}, {decode}",
        "decode_graphs": graphs.decode.backend,
        "largest_decode_graph": graphs.decode.max_bs,
        "prefill_graphs": graphs.prefill.backend,
        "chunked_prefill": found.chunked_prefill_size,
        "sampling": found.sampling_backend,
        "fp8_products": products,
        "kv_cache": found.kv_cache_dtype,
        "mem_fraction": found.mem_fraction_static,
        "memory_saver": found.enable_memory_saver,
    }


def fp8_products(server_args) -> str:
    """Return the name of the library that SGLang chooses for a linear layer's FP8 matrix products."""
    from sglang.srt.layers.quantization import fp8_utils

    fp8_utils.initialize_fp8_gemm_config(server_args)
    return fp8_utils.dispatch_w8a8_block_fp8_linear().__name__.partition("_w8a8")[0]


def main() -> None:
    given = json.load(sys.stdin)
    fake_devices()
    print("\n" + json.dumps([resolve(one["arguments"], one["environment"]) for one in given]))


if __name__ == "__main__":
    main()
