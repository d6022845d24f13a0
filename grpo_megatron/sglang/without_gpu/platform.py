"""An out-of-tree platform that runs SGLang on machines without a GPU, with plain PyTorch operators.

SGLang finds it by the entry-point group ``sglang.srt.platforms`` (declared in setup.py) and uses it if
``SGLANG_PLATFORM=grpo_cpu`` is set. Written for SGLang 0.5.23. The plug-in interface has changed between
minor versions before, so the CPU requirements pin the version.
"""

import os

PLATFORM_NAME = "grpo_cpu"
ATTENTION_BACKEND = "grpo_batched"  # batched_attention.BatchedAttention
# SGLang accepts only some names of backends for gpt-oss. Under this one, it finds BatchedAttention too.
SINKS_BACKEND = "triton"


def activate() -> str | None:
    """Return the import path of the platform class if SGLANG_PLATFORM names this platform, else None.

    SGLang calls this entry point wherever the package is installed, also on GPU machines. If the function
    returned the class on a GPU machine, SGLang 0.5.23 would use the CPU instead of CUDA, and the import of
    SGLang 0.5.17 would fail.
    """
    if os.environ.get("SGLANG_PLATFORM") != PLATFORM_NAME:
        return None
    return "grpo_megatron.sglang.without_gpu.platform:TorchCpuPlatform"


def _allocate_plain(dims, dtype, device, pin_memory, allocator, registration_granularity_bytes=None):
    """Allocate SGLang's host buffer for the experts that tokens are routed to, and return the buffer.

    The function replaces one of SGLang, which would also register the buffer with CUDA.
    """
    return allocator.allocate(dims, dtype=dtype, device=device)


def __getattr__(name: str):
    # The class definition imports SGLang's base classes. It is delayed to the first access, because SGLang
    # calls `activate()` while its own platform package is only partly imported.
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
            """Do nothing. The default collects garbage, which takes 0.35 s in SGLang's large heap at every
            weight update, and without a device allocator there is no memory to return."""

        def init_backend(self) -> None:
            from sglang.srt.layers.attention.attention_registry import register_attention_backend
            from sglang.srt.mem_cache.pool_host import common
            from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry
            from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import (
                AttnForwardMethod,
            )

            from grpo_megatron.cluster import gloo
            from grpo_megatron.sglang.without_gpu import adapters, fp8_layers, memory_saver, operators
            from grpo_megatron.sglang.without_gpu.batched_attention import BatchedAttention

            gloo.share_device()
            memory_saver.register()
            for name in (ATTENTION_BACKEND, SINKS_BACKEND):
                register_attention_backend(name)(BatchedAttention)
            # By default latent attention (MLA) of new tokens without a prefix uses keys and values that are
            # not in the pool. BatchedAttention reads them from the pool.
            AttentionBackendRegistry.register(ATTENTION_BACKEND, lambda *_: AttnForwardMethod.MLA)
            operators.register(self.get_dispatch_key_name())
            fp8_layers.register()
            adapters.register()
            common.ALLOC_MEMORY_FUNCS["cpu"] = _allocate_plain

        def post_load_model(self, model) -> None:
            from grpo_megatron.sglang.without_gpu import delta_nets, memory_saver, operators

            delta_nets.register()  # not in init_backend, when SGLang's modules are only partly imported
            operators.replace_joint_norms(model)
            with memory_saver.weights_region():
                operators.store_weights(model)

    globals()[name] = TorchCpuPlatform
    return TorchCpuPlatform
