"""SGLang on a machine without a GPU: an out-of-tree platform on plain PyTorch operators.

SGLang finds it by the entry-point group ``sglang.srt.platforms`` (declared in setup.py) and uses
it where ``SGLANG_PLATFORM=grpo_cpu`` is set. Written for SGLang 0.5.23; the plug-in interface has
changed between minor versions before, so the CPU requirements pin the version.
"""

import os

PLATFORM_NAME = "grpo_cpu"
ATTENTION_BACKEND = "grpo_batched"  # cpu_attention.BatchedAttention


def activate() -> str | None:
    """Entry point: where SGLang finds the platform class, if SGLANG_PLATFORM asks for it by name.

    SGLang calls this wherever the package is installed, on GPU machines too. An answer there would replace CUDA
    by the CPU (0.5.23), or end `import sglang` (0.5.17).
    """
    if os.environ.get("SGLANG_PLATFORM") != PLATFORM_NAME:
        return None
    return "grpo_megatron.sglang.cpu_platform:TorchCpuPlatform"


def _allocate_plain(dims, dtype, device, pin_memory, allocator, registration_granularity_bytes=None):
    """Of the host buffer of routed-expert capture, which SGLang registers with CUDA by default."""
    return allocator.allocate(dims, dtype=dtype, device=device)


def __getattr__(name: str):
    # The class needs SGLang's base classes at definition time. Building it on first access keeps
    # `activate()`, which SGLang calls while its own platform package is half imported, free of
    # that circle.
    if name != "TorchCpuPlatform":
        raise AttributeError(name)
    from sglang.srt.platforms.cpu import CpuDeviceMixin
    from sglang.srt.platforms.device_mixin import PlatformEnum
    from sglang.srt.platforms.interface import PlatformCapabilities, SRTPlatform

    class TorchCpuPlatform(CpuDeviceMixin, SRTPlatform):
        _enum = PlatformEnum.OOT
        capabilities = PlatformCapabilities()  # no Triton, no graph capture, no compiled kernels

        def get_default_attention_backend(self) -> str:
            return ATTENTION_BACKEND

        def get_dispatch_key_name(self) -> str:
            return "native"

        def is_pin_memory_available(self, device=None) -> bool:
            return False

        def empty_cache(self) -> None:
            # The stock one collects garbage: 0.35 s in SGLang's large heap, at every weight update,
            # to return memory that no device allocator holds.
            pass

        def init_backend(self) -> None:
            from sglang.srt.layers.attention.attention_registry import register_attention_backend
            from sglang.srt.mem_cache.pool_host import common
            from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry
            from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import (
                AttnForwardMethod,
            )

            from grpo_megatron.cluster import gloo
            from grpo_megatron.sglang import cpu_fp8, cpu_memory, cpu_operators
            from grpo_megatron.sglang.cpu_attention import BatchedAttention

            gloo.share_device()
            cpu_memory.register()
            register_attention_backend(ATTENTION_BACKEND)(BatchedAttention)
            # Latent attention of new tokens without a prefix would by default be computed from keys and values that are not in
            # the pool, where BatchedAttention looks for them.
            AttentionBackendRegistry.register(
                ATTENTION_BACKEND, lambda attention, batch: AttnForwardMethod.MLA
            )
            cpu_operators.register(self.get_dispatch_key_name())
            cpu_fp8.register()
            common.ALLOC_MEMORY_FUNCS["cpu"] = _allocate_plain

        def post_load_model(self, model) -> None:
            from grpo_megatron.sglang import cpu_memory, cpu_operators

            with cpu_memory.weights_region():
                cpu_operators.store_weights_by_column(model)

    globals()[name] = TorchCpuPlatform
    return TorchCpuPlatform
