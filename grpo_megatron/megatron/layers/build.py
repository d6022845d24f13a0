"""Builder of Megatron's GPTModel for this rank: one model chunk per virtual pipeline stage."""

from functools import partial

import torch
from megatron.core import parallel_state as mpu
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from grpo_megatron.capabilities import Capabilities
from grpo_megatron.config.lora import LoraConfig
from grpo_megatron.config.schema import Config, MegatronConfig, Precision, TransformerImpl
from grpo_megatron.errors import UserError
from grpo_megatron.megatron.head.logprobs import hand_out_hidden_states
from grpo_megatron.megatron.head.score import put_scalar_head
from grpo_megatron.megatron.layers.attention import PackedAttention
from grpo_megatron.megatron.layers.delta_net import DeltaNetLayer, GatedAttention, GatedNorm
from grpo_megatron.megatron.layers.joint_norm import JointNormAttention
from grpo_megatron.megatron.layers.latent_attention import LatentAttention, LatentAttentionParts
from grpo_megatron.megatron.layers.lora import (
    AdaptedColumns,
    AdaptedGateUp,
    AdaptedRows,
    NormedAdaptedRows,
)
from grpo_megatron.megatron.layers.modules import (
    ClampedSwiGLU,
    GeGLU,
    NormedRows,
    RMSNorm,
    SwiGLU,
    WholeRows,
)
from grpo_megatron.megatron.layers.router import Router
from grpo_megatron.megatron.layers.transformer_config import transformer_config
from grpo_megatron.megatron.release import GatedDeltaNetSubmodules, submodules_of
from grpo_megatron.model.architecture import Architecture


def uses_transformer_engine(megatron: MegatronConfig, arch: Architecture) -> bool:
    """Return True if the model's layers are TransformerEngine's, False if they are Megatron's local layers.

    megatron.transformer_impl=auto chooses TransformerEngine if this machine can run it and the precision is
    not fp32. In fp32, TransformerEngine has no fused attention, and its matrix products round their operands
    to TF32. LoRA adapters, gated delta networks, gpt-oss and Gemma 3 always need the local layers.

    arch: architecture of the model.

    Raises UserError if the configuration needs FP8 or TransformerEngine and this machine cannot run it, or if
    it asks for TransformerEngine's layers and precision fp32.
    """
    impl, precision = megatron.transformer_impl, megatron.precision
    here = Capabilities.of_this_machine().emulating(megatron.emulate_kernels)
    if precision == Precision.fp8 and here.fp8_problem:
        raise UserError(
            "megatron.precision=fp8 cannot be used on this rank's machine: "
            f"{here.fp8_problem}; set megatron.precision=bf16"
        )
    if megatron.lora.rank or arch.needs_local_layers:
        return False
    if impl == TransformerImpl.transformer_engine and here.transformer_engine_problem:
        raise UserError(
            "megatron.transformer_impl=transformer_engine cannot be used on this rank's machine: "
            f"{here.transformer_engine_problem}; set megatron.transformer_impl=local or "
            "megatron.transformer_impl=auto"
        )
    if impl == TransformerImpl.transformer_engine and precision == Precision.fp32:
        raise UserError(
            "megatron.precision=fp32 is not possible with megatron.transformer_impl=transformer_engine; set "
            "megatron.transformer_impl=local or megatron.transformer_impl=auto"
        )
    if impl == TransformerImpl.auto:
        return precision != Precision.fp32 and here.transformer_engine_problem is None
    return impl == TransformerImpl.transformer_engine


# {layer of Megatron: (HF names of what it computes in one or another model, its class with an adapter)}
_ADAPTED = {
    "linear_qkv": (("q_proj",), AdaptedColumns),
    "linear_proj": (("o_proj",), AdaptedRows),
    "in_proj": (("in_proj_qkvz", "in_proj_qkv"), AdaptedColumns),
    "out_proj": (("out_proj",), AdaptedRows),
    "linear_fc1": (("gate_proj",), AdaptedGateUp),
    "linear_fc2": (("down_proj",), AdaptedRows),
}


def _add_adapters(submodules, lora: LoraConfig) -> None:
    """Change Megatron's layer specs so that the linear layers in lora.targets are built with LoRA adapters.

    submodules: submodule specs of a layer's attention, gated delta network or MLP, changed in place.
    """
    for layer, (targets, adapted) in _ADAPTED.items():
        if lora.rank and hasattr(submodules, layer) and not set(targets).isdisjoint(lora.targets):
            if getattr(submodules, layer) is NormedRows:
                adapted = NormedAdaptedRows
            setattr(submodules, layer, ModuleSpec(module=adapted, params={"lora": lora}))


def _local_layer_spec(arch: Architecture, lora: LoraConfig, num_experts: int | None, window: int | None):
    """Return the spec of a layer of Megatron's local modules. The parameters are those of `_layer_spec`."""
    layer_spec = get_gpt_layer_local_spec(
        num_experts=num_experts, qk_layernorm=arch.has_head_norms, normalization="RMSNorm"
    )
    layer = layer_spec.submodules
    layer.input_layernorm = RMSNorm
    layer.pre_mlp_layernorm = RMSNorm
    attention = layer.self_attention.submodules
    rope = {"rope_frequencies": arch.rope_frequencies(window), "rope_factor": arch.rope_factor}
    attention.core_attention = partial(PackedAttention, window=window, sinks=arch.sinks, **rope)
    if arch.has_head_norms:
        attention.q_layernorm = RMSNorm
        attention.k_layernorm = RMSNorm
    if arch.output_gate:
        layer.self_attention.module = GatedAttention
    # The activation belongs to a dense layer's MLP, or to the MLPs of experts and shared experts.
    mlp = submodules_of(layer.mlp)
    if arch.output_norms:
        attention.linear_proj = mlp.linear_fc2 = NormedRows
    for with_activation in map(submodules_of, (mlp.experts, mlp.shared_experts)) if num_experts else (mlp,):
        with_activation.activation_func = _activation(arch)
        if arch.linear_bias:
            with_activation.linear_fc2 = WholeRows
    _add_adapters(attention, lora)
    if not num_experts:  # experts get no adapters
        _add_adapters(mlp, lora)
    return layer_spec


def _activation(arch: Architecture) -> type:
    if arch.gelu:
        return GeGLU
    return ClampedSwiGLU if arch.moe and arch.moe.swiglu_limit else SwiGLU


def _layer_spec(
    arch: Architecture,
    lora: LoraConfig,
    transformer_engine: bool,
    num_experts: int | None,
    window: int | None = None,
    is_delta: bool = False,
):
    """Return Megatron's spec of one transformer layer.

    lora: settings of the LoRA adapters. Without TransformerEngine's modules, they are added if lora.rank is
        not 0.
    transformer_engine: if True, the layer consists of TransformerEngine's modules. If False, it consists of
        Megatron's local modules, with this project's norm, attention and activation. These support packed
        sequences and run on a CPU too.
    num_experts: number of the layer's experts. None for a dense layer.
    window: sliding window of the layer's attention. TransformerEngine's modules ignore it, so sequences must
        not be longer.
    is_delta: True if the layer has a gated delta network instead of attention.
    """
    if transformer_engine:
        layer_spec = get_gpt_layer_with_transformer_engine_spec(
            num_experts=num_experts,
            moe_grouped_gemm=True,
            qk_layernorm=arch.has_head_norms,
            multi_latent_attention=arch.latent is not None,
        )
    else:
        layer_spec = _local_layer_spec(arch, lora, num_experts, window)
    if arch.joint_qk_norm:
        layer_spec.submodules.self_attention.module = JointNormAttention
    if arch.latent is not None:
        layer_spec.submodules.self_attention = _latent_attention(arch, transformer_engine)
    if is_delta:
        parts = GatedDeltaNetSubmodules(ColumnParallelLinear, GatedNorm, RowParallelLinear)
        _add_adapters(parts, lora)
        layer_spec.submodules.self_attention = ModuleSpec(module=DeltaNetLayer, submodules=parts)
    if num_experts:
        submodules_of(layer_spec.submodules.mlp).router = partial(
            Router, correction_bias=arch.moe.correction_bias
        )
    return layer_spec


def _latent_attention(arch: Architecture, transformer_engine: bool) -> ModuleSpec:
    if transformer_engine:
        from megatron.core.extensions import transformer_engine as te

        parts = LatentAttentionParts(
            te.TEColumnParallelLinear, te.TERowParallelLinear, te.TEDotProductAttention
        )
    else:
        parts = LatentAttentionParts(ColumnParallelLinear, RowParallelLinear, PackedAttention)
    return ModuleSpec(module=LatentAttention, params={"arch": arch}, submodules=parts)


def _block_spec(
    arch: Architecture,
    megatron_config: TransformerConfig,
    lora: LoraConfig,
    transformer_engine: bool,
    vp_stage: int | None,
) -> TransformerBlockSubmodules:
    """Return Megatron's specs of the transformer layers in one model chunk, and of the final norm.

    vp_stage: index of the chunk on this rank (virtual pipeline stage). None: the rank has only one chunk.
    """
    first = get_transformer_layer_offset(megatron_config, vp_stage=vp_stage)
    none = (False,) * arch.num_layers
    has_experts = arch.moe.layers if arch.moe else none
    is_delta = arch.delta.layers if arch.delta else none
    windows = arch.windows or (None,) * arch.num_layers
    layers = range(first, first + get_num_layers_to_build(megatron_config, vp_stage=vp_stage))
    specs = [
        _layer_spec(
            arch,
            lora,
            transformer_engine,
            arch.moe.num_experts if has_experts[i] else None,
            windows[i],
            is_delta[i],
        )
        for i in layers
    ]
    if transformer_engine:
        from megatron.core.extensions.transformer_engine import TENorm

        return TransformerBlockSubmodules(layer_specs=specs, layer_norm=TENorm)
    return TransformerBlockSubmodules(layer_specs=specs, layer_norm=RMSNorm)


def build_model(
    arch: Architecture, config: Config, transformer_engine: bool = False, without_memory: bool = False
) -> list[GPTModel]:
    """Build this rank's model chunks. Return them in forward order.

    There is one chunk, or several with a virtual pipeline. Parameters are uninitialised; the caller fills
    them. The last stage returns hidden states instead of logits, because a separate head computes log-probs
    from hidden states without storing all logits.

    transformer_engine: True for TransformerEngine's layers, False for Megatron's local layers. For a run,
        `uses_transformer_engine` decides this.
    without_memory: if True, create the parameters on torch's default device, not on the GPU. Callers set it
        within torch.device("meta"), to read names and shapes without memory for the parameters.
    """
    megatron = config.megatron
    megatron_config = transformer_config(arch, config, transformer_engine, without_memory)
    rotated_by_megatron = transformer_engine and arch.latent is None
    chunks = []
    for index in range(megatron.virtual_pipeline):
        vp_stage = index if megatron.virtual_pipeline > 1 else None
        chunk = GPTModel(
            config=megatron_config,
            transformer_layer_spec=_block_spec(
                arch, megatron_config, megatron.lora, transformer_engine, vp_stage
            ),
            vocab_size=arch.padded_vocab_size(megatron.tensor_parallel),
            max_sequence_length=arch.max_positions,
            pre_process=mpu.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
            post_process=mpu.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
            parallel_output=True,
            share_embeddings_and_output_weights=arch.tied_embeddings,
            # PackedAttention and LatentAttention rotate queries and keys themselves.
            position_embedding_type="rope" if rotated_by_megatron else "none",
            rotary_percent=arch.rotary_share,
            rotary_base=arch.rope_theta,
            vp_stage=vp_stage,
        )
        if rotated_by_megatron:
            # Megatron's RoPE scaling has Llama 3.1's numbers built in. Our frequencies come from config.json.
            chunk.rotary_pos_emb.inv_freq = arch.rope_frequencies().to(chunk.rotary_pos_emb.inv_freq.device)
        if chunk.pre_process and arch.embedding_factor != 1:
            _scale_embeddings(chunk, arch.embedding_factor)
        if chunk.post_process:
            (put_scalar_head if arch.scalar_head else hand_out_hidden_states)(chunk)
        if transformer_engine:
            _fuse_weight_gradients(chunk)
        chunks.append(
            chunk if megatron_config.use_cpu_initialization else chunk.cuda(torch.cuda.current_device())
        )
    return chunks


def _scale_embeddings(chunk: GPTModel, factor: float) -> None:
    """Multiply the token embeddings by a number, which is rounded to their dtype, as in transformers."""
    chunk.embedding.register_forward_hook(
        lambda module, inputs, output: output * torch.tensor(factor, dtype=output.dtype)
    )


def _fuse_weight_gradients(chunk: GPTModel) -> None:
    """Make TransformerEngine's layers add weight gradients directly to DDP's float32 gradient buffers.

    This saves a bf16 copy of each gradient. Megatron's option gradient_accumulation_fusion is not used,
    because it would also apply to the embedding and the output layer, which need apex for it.
    """
    for module in chunk.modules():
        if hasattr(module, "fuse_wgrad_accumulation"):
            module.fuse_wgrad_accumulation = True


def output_weight(chunk: GPTModel) -> torch.Tensor:
    """Return the weight with which the head computes log-probs or scores from hidden states.

    A language model's weight is [V_padded / tp, h]: this TP rank's rows of the output projection, or of the
    embedding if the two are tied. A reward model's weight is the score head's, [1, h].

    chunk: last model chunk of the last pipeline stage.
    """
    if chunk.share_embeddings_and_output_weights:
        return chunk.shared_embedding_or_output_weight()
    return chunk.output_layer.weight
