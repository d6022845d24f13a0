"""With what an engine is started: its arguments, and the environment of its process."""

import os
from typing import Any

from grpo_megatron.cluster.cpu_threads import openmp_variables
from grpo_megatron.config.engine import EngineConfig, Quantization
from grpo_megatron.config.schema import ModelConfig
from grpo_megatron.json_files import json_text
from grpo_megatron.model.families import read_architecture
from grpo_megatron.sglang.cpu_platform import ATTENTION_BACKEND, PLATFORM_NAME
from grpo_megatron.sglang.release import GPU_ARGUMENTS
from grpo_megatron.sglang.weight_door import DOOR
from grpo_megatron.weights import fp8_blocks


def engine_dtype(config: EngineConfig, model_path: str) -> str:
    """What the engine computes in, as torch names it."""
    # SGLang's own "auto" turns float32 checkpoints into float16.
    return (
        str(read_architecture(model_path).dtype).removeprefix("torch.")
        if config.dtype == "auto"
        else config.dtype
    )


def engine_arguments(
    config: EngineConfig, model: ModelConfig, seed: int, needs_tokenizer: bool, gpu: bool, routing: bool
) -> dict[str, Any]:
    """Arguments of sglang.Engine on one node; those of several have `node_arguments` too.

    routing: it will be asked which experts tokens went to.

    gpu: whether the engine has devices. Torch is not asked here, because the driver's machine may have a GPU where the
    engine's has none.
    """
    arguments = {
        "model_path": model.path,
        "dtype": engine_dtype(config, model.path),
        "load_format": config.load_format.value,
        "tp_size": config.tensor_parallel,
        "ep_size": config.expert_parallel,
        # 0.5.23 has another name for the two, and takes these.
        "dp_size": config.data_parallel_attention,
        "enable_dp_attention": config.data_parallel_attention > 1,
        "kv_cache_dtype": config.kv_cache_dtype.value,
        "enable_fp32_lm_head": model.fp32_head,
        "mem_fraction_static": config.mem_fraction,
        "max_total_tokens": config.max_total_tokens,
        "max_running_requests": config.max_running_requests,
        "disable_radix_cache": not config.prefix_cache,
        "random_seed": seed,
        "skip_server_warmup": True,
        "log_level": "warning",
        "weight_version": "0",
        # Fused, a layer's shared experts are further rows of the stacked ones, and the weight map has them on their own.
        "disable_shared_experts_fusion": True,
        # Stop strings need text; without them ids are enough, and the detokenizer stays idle.
        "skip_tokenizer_init": not needs_tokenizer,
        "custom_weight_loader": [DOOR],
    }
    if config.quantization == Quantization.fp8:
        # As if the checkpoint were in FP8. What SGLang reads from it has no scales, and means nothing before the first weight sync.
        arguments["json_model_override_args"] = json_text(
            {"quantization_config": fp8_blocks.settings(["lm_head"])}
        )
    if routing:
        arguments["enable_return_routed_experts"] = True
    return arguments | (_on_gpu(arguments["dtype"]) if gpu else _on_cpu(config))


def _on_gpu(dtype: str) -> dict[str, Any]:
    # SGLang would choose FlashAttention 3 or FlashInfer, which have kernels for 16 bits and less.
    return GPU_ARGUMENTS | ({"attention_backend": "torch_native"} if dtype == "float32" else {})


def _on_cpu(config: EngineConfig) -> dict[str, Any]:
    return {
        "device": "cpu",
        "attention_backend": ATTENTION_BACKEND,
        "sampling_backend": "pytorch",
        "grammar_backend": "none",
        "disable_cuda_graph": True,
        # An idle scheduler would poll without a pause, and take a core from the trainer.
        "sleep_on_idle": True,
        # Overlapping needs a device to overlap with, and decodes one token too many of every response.
        "disable_overlap_schedule": True,
        # This share of the host's memory is not reserved: max_total_tokens bounds the pool.
        "mem_fraction_static": 0.3,
        "max_total_tokens": config.max_total_tokens or 65536,
    }


def node_arguments(node: int, nodes: int, address: str) -> dict[str, Any]:
    """Further arguments on a node of an engine. address: host:port, with the ports behind it, on which the first one listens."""
    return {"nnodes": nodes, "node_rank": node, "dist_init_addr": address}


def engine_environment(config: EngineConfig, gpu: bool, threads: int = 1) -> dict[str, str]:
    """Return an engine's variables beside those that Cluster.options sets, to be set before it starts.

    threads: intra-op threads of each of its tensor-parallel ranks on a CPU.
    """
    # sglang.Engine returns on an engine's further nodes too, once they are ready.
    env = {"SGLANG_BLOCK_NONZERO_RANK_CHILDREN": "0"}
    if gpu:
        if config.quantization == Quantization.fp8:
            # At its start an engine compiles DeepGEMM's kernels. With this it does so for about 3,000 sizes
            # of a batch in place of 16,384, and for any other size when it meets one.
            name = "SGLANG_JIT_DEEPGEMM_FAST_WARMUP"
            env[name] = os.environ.get(name, "1")
        return env
    env |= {
        "SGLANG_PLATFORM": PLATFORM_NAME,
        **openmp_variables(threads),
        "CUDA_VISIBLE_DEVICES": "",
        # Where starting an operator costs as much as the operator, what autograd adds to it is a tenth of decoding.
        "SGLANG_ENABLE_TORCH_INFERENCE_MODE": "true",
    }
    if config.tensor_parallel > 1:
        cores = os.cpu_count() or 1
        env["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(
            str(rank % cores) for rank in range(config.tensor_parallel)
        )
    return env
