"""The section `rollout.engine` of the configuration."""

from enum import Enum
from typing import Literal

from grpo_megatron.config.options import LONGEST_WAIT, Threads, dataclass, option


class LoadFormat(str, Enum):
    auto = "auto"
    dummy = "dummy"


class Quantization(str, Enum):
    none = "none"
    fp8 = "fp8"


class KVCacheDtype(str, Enum):
    auto = "auto"
    fp8_e4m3 = "fp8_e4m3"
    fp8_e5m2 = "fp8_e5m2"


@dataclass
class EngineConfig:
    num_engines: int = option(1, "number of SGLang engines", gt=0)
    tensor_parallel: int = option(
        1, "tensor-parallel ranks inside one engine; beyond a node's GPUs, on several whole nodes", gt=0
    )
    expert_parallel: int = option(
        1, "parts the experts of a layer are divided into over an engine's ranks (EP)", gt=0
    )
    data_parallel_attention: int = option(
        1,
        "groups of an engine's ranks that attend to requests of their own: each has whole attention layers "
        "and a KV cache that no other group has a copy of; 1: one group (GPU)",
        gt=0,
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = option(
        "auto",
        "weights in the engine: auto (the dtype in config.json), float32, bfloat16, float16",
    )
    quantization: Quantization = option(
        Quantization.none,
        "weights of the engine's linear layers and experts: none (its dtype), fp8 (E4M3 with a scale for "
        "each block of 128 x 128, quantised by the trainer at every weight sync; no latent attention, dtype "
        "bfloat16)",
    )
    load_format: LoadFormat = option(
        LoadFormat.auto,
        "weights an engine starts with: auto (model.path's), dummy (random: faster, and the first weight "
        "sync replaces them)",
    )
    mem_fraction: float = option(0.8, "share of device memory for weights and KV cache (GPU)", gt=0, lt=1)
    kv_cache_dtype: KVCacheDtype = option(
        KVCacheDtype.auto,
        "keys and values in the cache: auto (the engine's dtype), or fp8_e4m3, fp8_e5m2 (GPU; twice the "
        "tokens, rounded log-probs)",
    )
    max_total_tokens: int | None = option(None, "KV cache size; null: from mem_fraction", "tokens", gt=0)
    max_running_requests: int = option(256, "requests decoded together in one engine", gt=0)
    prefix_cache: bool = option(
        True,
        "keep keys and values for requests that begin alike (SGLang's radix cache); a cost where none do: "
        "short prompts, one turn",
    )
    cpu_threads: Threads = option(
        "auto",
        "intra-op threads of each tensor-parallel rank of an engine on a machine without a GPU; auto: "
        "OMP_NUM_THREADS, or without it the node's cores divided among the engines' ranks there, because "
        "trainer ranks wait while engines generate",
    )
    # Long, because an FP8 engine whose kernel caches are empty compiles kernels for many minutes.
    start_timeout: float = option(
        1800.0, "how long an engine may take to start", "seconds", gt=0, le=LONGEST_WAIT
    )
    request_timeout: float = option(
        1800.0,
        "how long to wait without any sample finishing before giving up",
        "seconds",
        gt=0,
        le=LONGEST_WAIT,
    )
