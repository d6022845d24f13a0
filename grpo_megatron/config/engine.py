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
        "Maximum number of SGLang engines. If it is more than num_engines, further engines are started "
        "during the run on free devices of the Ray cluster, for example on nodes that have joined. null: the "
        "number does not grow.",
        gt=0,
    )
    tensor_parallel: int = option(
        1,
        "Number of tensor-parallel ranks of an engine. An engine with more ranks than a node has GPUs takes "
        "several whole nodes.",
        gt=0,
    )
    expert_parallel: int = option(
        1,
        "Number of an engine's ranks among which the experts of a layer are divided (EP).",
        gt=0,
    )
    data_parallel_attention: int = option(
        1,
        "Number of groups into which an engine's ranks are divided for attention. Each group has whole "
        "attention layers, requests of its own, and its own part of the KV cache. 1: all ranks share the "
        "attention layers. More than 1 needs GPUs.",
        gt=0,
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = option(
        "auto",
        "Dtype of the weights in the engine. auto: the dtype in config.json.",
    )
    quantization: Quantization = option(
        Quantization.none,
        "Quantisation of the engine's linear layers and experts. none: they have dtype. fp8: E4M3 with a "
        "scale for each block of 128 x 128, quantised by the trainer at every weight sync; it needs dtype "
        "bfloat16, and a model without latent attention.",
    )
    load_format: LoadFormat = option(
        LoadFormat.auto,
        "Weights that an engine starts with. auto: those of model.path. dummy: random ones, which are made "
        "faster and replaced by the first weight sync.",
    )
    mem_fraction: float = option(0.8, "Share of device memory for weights and KV cache, on GPUs.", gt=0, lt=1)
    kv_cache_dtype: KVCacheDtype = option(
        KVCacheDtype.auto,
        "Dtype of the KV cache. auto: the engine's dtype. fp8_e4m3, fp8_e5m2: half the size, so that twice "
        "the tokens fit, with rounded log-probs; they need GPUs.",
    )
    max_total_tokens: int | None = option(
        None, "Size of the KV cache. null: what mem_fraction leaves.", "tokens", gt=0
    )
    max_running_requests: int = option(
        256, "Maximum number of requests that one engine decodes together.", gt=0
    )
    prefix_cache: bool = option(
        True,
        "true: the engine reuses the KV cache for requests with the same beginning (SGLang's radix "
        "cache). If there are few such requests, as with short prompts and one turn, it only costs time.",
    )
    cpu_threads: Threads = option(
        "auto",
        "Number of intra-op threads of each tensor-parallel rank of an engine, on a machine without a GPU. "
        "auto: OMP_NUM_THREADS; if it is not set, the node's cores divided among the engine ranks there, "
        "because trainer ranks wait while engines generate.",
    )
    log_every: int = option(
        4,
        "Number of tokens after which an engine reports what it has sampled of a response, if there are "
        "several engines. If it is lost, another engine continues the response after these tokens. 0: "
        "another engine samples the response anew.",
        "tokens",
        ge=0,
    )
    # Long, because an FP8 engine whose kernel caches are empty compiles kernels for many minutes.
    start_timeout: float = option(
        1800.0, "Maximum time that an engine may take to start.", "seconds", gt=0, le=LONGEST_WAIT
    )
    patience: float = option(
        1800.0,
        "Maximum time in which no engine serves, while lost ones are started again. After that, all ranks "
        "start again too; with 0, at once.",
        "seconds",
        ge=0,
        le=LONGEST_WAIT,
    )
    request_timeout: float = option(
        1800.0,
        "Maximum time in which no sample is finished. After that the run gives up on the engines.",
        "seconds",
        gt=0,
        le=LONGEST_WAIT,
    )
