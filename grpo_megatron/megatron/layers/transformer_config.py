"""Megatron's TransformerConfig, made from a model's architecture and the options of this run."""

import math

import torch
import torch.nn.functional as F

from grpo_megatron.config.schema import Config, MegatronConfig, Precision, Recompute
from grpo_megatron.errors import UserError
from grpo_megatron.model.architecture import Architecture
from grpo_megatron.model.parallel_sizes import ParallelSizes


def _pipeline_layout(arch: Architecture, sizes: ParallelSizes) -> list[list[str]] | None:
    """Return the layer types of each model chunk, such as [["embedding", "decoder"], ["decoder", "loss"]].

    Returns None without megatron.pipeline_layers. Megatron then divides the layers evenly over the chunks.
    """
    if not sizes.pipeline_layers:
        return None
    chunks = [["decoder"] * layers for layers in sizes.chunk_layers(arch.num_layers)]
    return [["embedding", *chunks[0]], *chunks[1:-1], [*chunks[-1], "loss"]]


def _parallel_settings(arch: Architecture, config: Config) -> dict:
    sizes = ParallelSizes.from_config(config.megatron)
    return {
        "tensor_model_parallel_size": sizes.tp,
        "pipeline_model_parallel_size": sizes.pp,
        "virtual_pipeline_model_parallel_size": sizes.vpp if sizes.vpp > 1 else None,
        "pipeline_model_parallel_layout": _pipeline_layout(arch, sizes),
        # With batched, blocking transfers the interleaved schedule is silently wrong on gloo.
        "overlap_p2p_comm": sizes.vpp > 1,
        "batch_p2p_comm": sizes.vpp == 1,
        "context_parallel_size": sizes.cp,
        "sequence_parallel": sizes.sequence_parallel,
        # Packs differ in length, so pipeline stages must exchange shapes. Megatron then insists on the
        # alltoall dispatcher, for dense models too.
        "variable_seq_lengths": sizes.pp > 1 and not config.train.constant_length_packs,
        "moe_token_dispatcher_type": "alltoall",
        # On gloo this would free the storage of a tensor that is still being sent.
        "deallocate_pipeline_outputs": torch.cuda.is_available(),
    }


def _expert_settings(arch: Architecture, config: Config, transformer_engine: bool) -> dict:
    if arch.moe is None:
        return {}
    sigmoid = {}
    if arch.moe.sigmoid:
        # Our Router handles the correction bias itself.
        sigmoid = {
            "moe_router_score_function": "sigmoid",
            "moe_router_num_groups": arch.moe.groups,
            "moe_router_group_topk": arch.moe.top_groups,
            "moe_router_topk_scaling_factor": arch.moe.weight_factor,
        }
    return {
        "num_moe_experts": arch.moe.num_experts,
        "moe_router_topk": arch.moe.top_k,
        "moe_ffn_hidden_size": arch.moe.ffn_hidden_size,
        "moe_shared_expert_intermediate_size": arch.moe.shared_ffn_hidden_size or None,
        "moe_shared_expert_gate": arch.moe.shared_gate,
        "moe_layer_freq": [int(has_experts) for has_experts in arch.moe.layers],
        # Softmax over the chosen experts equals the softmax over all experts, scaled to sum to 1.
        "moe_router_pre_softmax": not arch.moe.normalize,
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "aux_loss" if config.moe.aux_loss_coeff else "none",
        "moe_aux_loss_coeff": config.moe.aux_loss_coeff,
        "moe_z_loss_coeff": config.moe.z_loss_coeff or None,
        "expert_model_parallel_size": config.megatron.expert_parallel,
        "expert_tensor_parallel_size": config.megatron.expert_tensor_parallel,
        "moe_grouped_gemm": transformer_engine,
        "activation_func_clamp_value": arch.moe.swiglu_limit,
        **sigmoid,
    }


def _delta_settings(arch: Architecture) -> dict:
    if arch.delta is None:
        return {}
    # experimental_attention_variant is left out: only Megatron's own layer specs need it, and its check
    # refuses CP, which Megatron's own layer cannot do.
    return {
        "linear_attention_freq": [int(is_delta) for is_delta in arch.delta.layers],
        "linear_conv_kernel_dim": arch.delta.kernel,
        "linear_key_head_dim": arch.delta.key_dim,
        "linear_value_head_dim": arch.delta.value_dim,
        "linear_num_key_heads": arch.delta.key_heads,
        "linear_num_value_heads": arch.delta.value_heads,
    }


def _recompute_settings(megatron: MegatronConfig) -> dict:
    if megatron.recompute == Recompute.none:
        return {}
    if megatron.recompute == Recompute.selective:
        return {"recompute_granularity": "selective", "recompute_modules": list(megatron.recompute_modules)}
    return {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def _fp8_settings(megatron: MegatronConfig) -> dict:
    if megatron.precision != Precision.fp8:
        return {}
    first, last = megatron.fp8.bf16_first_layers, megatron.fp8.bf16_last_layers
    return {
        "fp8": megatron.fp8.format.value,
        "fp8_recipe": megatron.fp8.recipe.value,
        # TransformerEngine's own defaults. With Megatron's defaults, only the last step's amax would count.
        "fp8_amax_history_len": 1024,
        "fp8_amax_compute_algo": "max",
        "first_last_layers_bf16": first + last > 0,
        "num_layers_at_start_in_bf16": first,
        "num_layers_at_end_in_bf16": last,
    }


def _fusions(arch: Architecture, transformer_engine: bool) -> dict:
    """Return the TransformerConfig options that switch Megatron's fused kernels on or off.

    Only TransformerEngine's layers use fused kernels. With local layers, this project's own activation, norm
    and attention replace Megatron's.
    """
    fused = transformer_engine
    return {
        # Without fusion, Megatron copies the sequence lengths to the host in every layer and pass.
        "apply_rope_fusion": fused and arch.latent is None,
        "bias_activation_fusion": fused,
        "bias_dropout_fusion": fused,
        "use_te_activation_func": not fused,  # use the layer spec's activation, modules.SwiGLU
        "masked_softmax_fusion": False,
        "persist_layer_norm": False,
        # Set per layer instead, see build._fuse_weight_gradients.
        "gradient_accumulation_fusion": False,
    }


def _score_settings(arch: Architecture, transformer_engine: bool) -> dict:
    """Return the options for another factor of the attention scores than 1 / sqrt(head_dim); often {}.

    Gemma 3 has such a factor. TransformerEngine's layers also need one for YaRN's factor of cosines and
    sines, because their rotary kernel has no such factor. If all channels are rotated, the factor's square
    scales the attention scores. This project's own attention layers apply the factor themselves.
    """
    if arch.query_scalar is not None:
        return {"softmax_scale": arch.softmax_factor / math.sqrt(arch.head_dim)}
    if not transformer_engine or arch.latent is not None or arch.rope_factor == 1:
        return {}
    if arch.rotary_share != 1:
        raise UserError(
            "megatron.transformer_impl=transformer_engine cannot be used with YaRN RoPE scaling and "
            "partial_rotary_factor < 1, because the kernel has no factor of cosines; set "
            "megatron.transformer_impl=local"
        )
    return {"softmax_scale": arch.rope_factor**2 / math.sqrt(arch.head_dim)}


def transformer_config(arch: Architecture, config: Config, transformer_engine: bool, without_memory: bool):
    """Return Megatron's TransformerConfig for a model.

    transformer_engine: True for TransformerEngine's layers, False for Megatron's local layers.
    without_memory: if True, parameters are created on torch's default device, such as "meta", not on the GPU.
    """
    from megatron.core.transformer import TransformerConfig

    params_dtype = torch.float32 if config.megatron.precision == Precision.fp32 else torch.bfloat16
    return TransformerConfig(
        num_layers=arch.num_layers,
        hidden_size=arch.hidden_size,
        ffn_hidden_size=arch.ffn_hidden_size,
        num_attention_heads=arch.num_heads,
        num_query_groups=arch.num_kv_heads,
        kv_channels=arch.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=arch.norm_eps,
        layernorm_zero_centered_gamma=arch.zero_centred_norms,
        # Megatron adds up the gradients of these norms over TP. Each TP rank has the whole norm of a head,
        # but only a part of a norm over all heads.
        qk_layernorm=arch.has_head_norms,
        attention_output_gate=arch.output_gate,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=arch.linear_bias,
        add_qkv_bias=arch.qkv_bias,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        attention_softmax_in_fp32=True,
        params_dtype=params_dtype,
        pipeline_dtype=params_dtype,
        bf16=params_dtype == torch.bfloat16,
        # Weights come from the checkpoint: skip Megatron's random initialisation.
        perform_initialization=False,
        use_cpu_initialization=without_memory or not torch.cuda.is_available(),
        # Our loss functions return sums. Megatron divides them by the token count that is returned beside
        # them (see forward_backward.py).
        calculate_per_token_loss=True,
        **_fusions(arch, transformer_engine),
        **_score_settings(arch, transformer_engine),
        **_fp8_settings(config.megatron),
        **_parallel_settings(arch, config),
        **_expert_settings(arch, config, transformer_engine),
        **_delta_settings(arch),
        **_recompute_settings(config.megatron),
    )
