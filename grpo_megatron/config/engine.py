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
    num_engines: int = option(1, "Number of SGLang engines.", gt=0)
    max_engines: int | None = option(
        None,
        "Maximum number of engines. Those beyond num_engines start during the run on free devices of the "
        "cluster. null: num_engines.",
        gt=0,
    )
    tensor_parallel: int = option(
        1,
        "Tensor-parallel ranks. If a node has fewer GPUs, the engine takes several whole nodes.",
        gt=0,
    )
    expert_parallel: int = option(
        1,
        "Ranks among which a layer's experts are divided (EP).",
        gt=0,
    )
    data_parallel_attention: int = option(
        1,
        "Groups of ranks, each with whole attention layers and its own requests and KV cache. More than 1 "
        "needs GPUs.",
        gt=0,
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = option(
        "auto",
        "Dtype of the weights. auto: the dtype in config.json.",
    )
    quantization: Quantization = option(
        Quantization.none,
        "Format of linear layers and experts. none: dtype. fp8: E4M3 with a scale per 128 x 128 block; it "
        "needs dtype bfloat16 and no latent attention.",
    )
    load_format: LoadFormat = option(
        LoadFormat.auto,
        "Weights at the start. auto: those of model.path. dummy: random ones until the first weight sync, "
        "which is faster.",
    )
    mem_fraction: float = option(0.8, "Share of device memory for weights and KV cache, on GPUs.", gt=0, lt=1)
    kv_cache_dtype: KVCacheDtype = option(
        KVCacheDtype.auto,
        "Dtype of the KV cache. auto: the weights' dtype. fp8_e4m3, fp8_e5m2: twice the tokens fit, with "
        "rounded log-probs; they need GPUs.",
    )
    max_total_tokens: int | None = option(
        None, "Size of the KV cache. null: what mem_fraction leaves.", "tokens", gt=0
    )
    max_running_requests: int = option(
        256, "Maximum number of requests that an engine decodes together.", gt=0
    )
    prefix_cache: bool = option(
        True,
        "Share the KV cache of equal beginnings (SGLang's radix cache). With short prompts and one turn, "
        "this only costs time.",
    )
    cpu_threads: Threads = option(
        "auto",
        "Intra-op threads per rank, without a GPU. auto: OMP_NUM_THREADS, or else the node's cores divided "
        "among its engine ranks.",
    )
    log_every: int = option(
        4,
        "Interval of an engine's reports of responses. If it is lost, another one continues from the last "
        "report. 0: from scratch.",
        "tokens",
        ge=0,
    )
    # Long, because an FP8 engine whose kernel caches are empty compiles kernels for many minutes.
    start_timeout: float = option(
        1800.0, "Maximum time of an engine's start.", "seconds", gt=0, le=LONGEST_WAIT
    )
    patience: float = option(
        1800.0,
        "Maximum time in which no engine serves. Then all ranks restart too.",
        "seconds",
        ge=0,
        le=LONGEST_WAIT,
    )
    request_timeout: float = option(
        1800.0,
        "Maximum time in which no sample is finished. Then the run ends.",
        "seconds",
        gt=0,
        le=LONGEST_WAIT,
    )
