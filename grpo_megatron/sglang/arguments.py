"""Arguments and environment variables that an engine is started with."""

import os
from pathlib import Path
from typing import Any

from grpo_megatron.cluster.cpu_threads import openmp_variables
from grpo_megatron.config.engine import EngineConfig, Quantization
from grpo_megatron.config.lora import LoraConfig
from grpo_megatron.config.schema import ModelConfig
from grpo_megatron.files import json_text
from grpo_megatron.model.families import read_architecture
from grpo_megatron.sglang import models
from grpo_megatron.sglang.release import GPU_ARGUMENTS
from grpo_megatron.sglang.weight_receiver import ADAPTER_SLOTS, RECEIVE_WEIGHTS
from grpo_megatron.sglang.without_gpu.platform import ATTENTION_BACKEND, PLATFORM_NAME, SINKS_BACKEND
from grpo_megatron.weights import fp8_blocks
from grpo_megatron.weights.stored import read_stored
from grpo_megatron.weights.stored_names import GEMMA


def engine_dtype(config: EngineConfig, model_path: str) -> str:
    """Return the name of the dtype that the engine computes in, such as "bfloat16".

    If rollout.engine.dtype is "auto", this is the dtype of the checkpoint at `model_path`.
    """
    # SGLang's own "auto" converts float32 checkpoints to float16.
    return (
        str(read_architecture(model_path).dtype).removeprefix("torch.")
        if config.dtype == "auto"
        else config.dtype
    )


def engine_arguments(
    config: EngineConfig,
    model: ModelConfig,
    seed: int,
    needs_tokenizer: bool,
    gpu: bool,
    routing: bool,
    lora: LoraConfig | None = None,
) -> dict[str, Any]:
    """Return {name: value} of the arguments of sglang.Engine for one engine.

    An engine on several nodes also needs `node_arguments`.

    config: the section rollout.engine of the configuration.
    model: the section model of the configuration.
    seed: random seed of the engine.
    needs_tokenizer: True if the engine must convert tokens to text, for stop strings.
    gpu: True if the engine has GPUs. The caller says so, because the engine may run on another machine.
    routing: True if requests will ask for the experts (MoE) that each token was routed to.
    lora: settings of the adapter that the engine serves. None: it serves merged weights.
    """
    arguments = {
        "model_path": model.path,
        "dtype": engine_dtype(config, model.path),
        "load_format": config.load_format.value,
        "tp_size": config.tensor_parallel,
        "ep_size": config.expert_parallel,
        # 0.5.23 has other names for these two arguments, but still accepts these.
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
        # With fusion, a layer's shared experts are appended to the stack of routed experts. The weight map
        # has them as separate parameters.
        "disable_shared_experts_fusion": True,
        # Only stop strings need text. Without them token ids are enough, and the detokenizer stays idle.
        "skip_tokenizer_init": not needs_tokenizer,
        "custom_weight_loader": [RECEIVE_WEIGHTS],
    }
    overrides = _model_settings(model.path)
    if config.quantization == Quantization.fp8:
        # Pretend that the checkpoint is in FP8. The weights that SGLang loads from it have no scales, so they
        # are meaningless until the first weight sync.
        overrides["quantization_config"] = fp8_blocks.settings(["lm_head"])
    if overrides:
        arguments["json_model_override_args"] = json_text(overrides)
    if routing:
        arguments["enable_return_routed_experts"] = True
    arguments |= _for_adapter(lora) | (_on_gpu(arguments["dtype"]) if gpu else _on_cpu(config))
    return arguments | _for_family(model.path, gpu)


def _for_family(path: str, gpu: bool) -> dict[str, Any]:
    """Return {name: value} of the arguments that only engines of some models need; often {}.

    path: folder of the model.
    gpu: True if the engine has GPUs.
    """
    if read_stored(Path(path)).with_vision == GEMMA:
        return {"enable_multimodal": False}
    if not read_architecture(path).sinks:
        return {}
    if gpu:
        # SGLang's other choice transposes the experts' weights, which the weight map does not know.
        return {"moe_runner_backend": "triton"}
    # The pool for layers with windows has slots of its own, which BatchedAttention does not know.
    return {"attention_backend": SINKS_BACKEND, "disable_hybrid_swa_memory": True}


def _for_adapter(lora: LoraConfig | None) -> dict[str, Any]:
    if lora is None:
        return {}
    return {
        "enable_lora": True,
        "max_lora_rank": lora.rank,
        "lora_target_modules": list(lora.targets),
        "max_loras_per_batch": ADAPTER_SLOTS,
    }


def _model_settings(path: str) -> dict[str, Any]:
    """Return {key of config.json: value} that SGLang needs beyond what the file says; often {}.

    path: folder of the model.
    """
    arch, settings = read_architecture(path), {}
    if arch.delta is not None:
        # transformers writes these settings under other keys, where SGLang ignores them.
        settings = {
            "full_attention_interval": arch.delta.attention_interval,
            "partial_rotary_factor": arch.rotary_share,
            "rope_theta": arch.rope_theta,
        }
    with_vision = read_stored(Path(path)).with_vision
    if with_vision is None:
        return settings
    if with_vision == GEMMA:
        return _text_settings(path)
    # The engine then leaves out the vision model, which is not trained. SGLang's argument of this name
    # refuses Qwen3.5. SGLang 0.5.17 does not know the key, and loads the vision model.
    return {"text_config": settings, "language_model_only": True}


def _text_settings(path: str) -> dict[str, Any]:
    """Return {key: value} that replaces config.json, so that SGLang serves Gemma 3's language model alone.

    The checkpoint also has a vision model. SGLang's class for both would load it, and would need the settings
    of an image processor.

    path: folder of the model.
    """
    from transformers import AutoConfig

    text = AutoConfig.from_pretrained(path).text_config.to_dict()
    # The dtype is an argument of its own.
    known = {key: value for key, value in text.items() if value is not None and key != "dtype"}
    return known | {"architectures": ["Gemma3ForCausalLM"]}


def _on_gpu(dtype: str) -> dict[str, Any]:
    # By default SGLang chooses FlashAttention 3 or FlashInfer, which have no kernels for float32.
    return GPU_ARGUMENTS | ({"attention_backend": "torch_native"} if dtype == "float32" else {})


def _on_cpu(config: EngineConfig) -> dict[str, Any]:
    return {
        "device": "cpu",
        "attention_backend": ATTENTION_BACKEND,
        "lora_backend": "torch_native",
        "sampling_backend": "pytorch",
        "grammar_backend": "none",
        "disable_cuda_graph": True,
        # Otherwise an idle scheduler polls without a pause and takes a CPU core from the trainer.
        "sleep_on_idle": True,
        # Without a device there is nothing to overlap with, and overlapping decodes one extra token per
        # response.
        "disable_overlap_schedule": True,
        # This fraction of the host's memory is not reserved, because max_total_tokens limits the pool.
        "mem_fraction_static": 0.3,
        "max_total_tokens": config.max_total_tokens or 65536,
    }


def node_arguments(node: int, nodes: int, address: str) -> dict[str, Any]:
    """Return the additional arguments of sglang.Engine for one node of an engine that spans several nodes.

    node: index of the node, from 0.
    nodes: number of nodes.
    address: host:port of the first node. SGLang may also use the ports that follow this port.
    """
    return {"nnodes": nodes, "node_rank": node, "dist_init_addr": address}


def engine_environment(
    config: EngineConfig, gpu: bool, threads: int = 1, model: str | None = None
) -> dict[str, str]:
    """Return the environment variables with which the Ray actor of an engine must be started.

    Variables that every actor of a run needs are not included: Cluster.options adds them.

    gpu: True if the engine has GPUs.
    threads: intra-op threads of each tensor-parallel rank on a CPU.
    model: folder of the model. None: one that SGLang's own classes can load.
    """
    # With this, sglang.Engine(...) also returns on an engine's further nodes, once they are ready.
    env = {"SGLANG_BLOCK_NONZERO_RANK_CHILDREN": "0"}
    if model and read_stored(Path(model)).with_vision == GEMMA:
        env["SGLANG_EXTERNAL_MODEL_PACKAGE"] = models.__name__
    if gpu:
        if config.quantization == Quantization.fp8:
            # An engine compiles DeepGEMM's kernels when it starts. With this variable it does so for about
            # 3,000 batch sizes instead of 16,384. Kernels for other sizes are compiled when they are first
            # needed.
            name = "SGLANG_JIT_DEEPGEMM_FAST_WARMUP"
            env[name] = os.environ.get(name, "1")
        return env
    env |= {
        "SGLANG_PLATFORM": PLATFORM_NAME,
        **openmp_variables(threads),
        "CUDA_VISIBLE_DEVICES": "",
        # Gated delta networks keep inputs of their convolution. By default SGLang rounds them to bfloat16.
        "SGLANG_MAMBA_CONV_DTYPE": "float32",
        # Operators are so small that autograd's overhead would be a tenth of the decoding time.
        "SGLANG_ENABLE_TORCH_INFERENCE_MODE": "true",
    }
    if config.tensor_parallel > 1:
        # Without this, SGLang refuses more ranks than the machine has NUMA nodes. It binds no thread to these
        # cores here, because only its compiled CPU kernels do that, and they are not installed.
        cores = os.cpu_count() or 1
        env["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(
            str(rank % cores) for rank in range(config.tensor_parallel)
        )
    return env
