"""Builds the GPTModel of this rank's pipeline stage."""

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec, get_gpt_layer_with_transformer_engine_spec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from grpo_megatron.config.schema import TransformerImpl
from grpo_megatron.doctor import transformer_engine_problem
from grpo_megatron.megatron.architecture import Architecture, transformer_config
from grpo_megatron.megatron.logprobs import hand_out_hidden_states
from grpo_megatron.megatron.modules import PackedAttention, RMSNorm
from grpo_megatron.megatron.parallel import ParallelSizes, RankInfo


def uses_transformer_engine(impl: TransformerImpl) -> bool:
    """Whether layers are TransformerEngine's here; `auto` takes it where it can run."""
    if impl == TransformerImpl.auto:
        return transformer_engine_problem() is None
    return impl == TransformerImpl.transformer_engine


def layer_spec(config, transformer_engine: bool):
    """TransformerEngine's layers, or Megatron's local spec with our norm and attention."""
    if transformer_engine:
        return get_gpt_layer_with_transformer_engine_spec(qk_layernorm=config.qk_layernorm)
    spec = get_gpt_layer_local_spec(qk_layernorm=config.qk_layernorm, normalization="RMSNorm")
    layer = spec.submodules
    layer.input_layernorm = RMSNorm
    layer.pre_mlp_layernorm = RMSNorm
    attention = layer.self_attention.submodules
    attention.core_attention = PackedAttention
    if config.qk_layernorm:
        attention.q_layernorm = RMSNorm
        attention.k_layernorm = RMSNorm
    num_local = config.num_layers // config.pipeline_model_parallel_size
    return TransformerBlockSubmodules(layer_specs=[spec] * num_local, layer_norm=RMSNorm)


def build_model(
    arch: Architecture,
    sizes: ParallelSizes,
    rank: RankInfo,
    params_dtype: torch.dtype,
    transformer_engine: bool = False,
    fp8: bool = False,
) -> GPTModel:
    """An uninitialised GPTModel stage that returns hidden states; fill it with weights.load_hf."""
    config = transformer_config(arch, sizes, params_dtype, fp8)
    model = GPTModel(
        config=config,
        transformer_layer_spec=layer_spec(config, transformer_engine),
        vocab_size=arch.padded_vocab_size(sizes.tp),
        max_sequence_length=arch.max_positions,
        pre_process=rank.first_stage,
        post_process=rank.last_stage,
        parallel_output=True,
        share_embeddings_and_output_weights=arch.tied_embeddings,
        position_embedding_type="rope",
        rotary_base=arch.rope_theta,
    )
    # Megatron's own rope scaling has Llama 3.1's numbers built in; these come from config.json.
    model.rotary_pos_emb.inv_freq = arch.rope_frequencies().to(model.rotary_pos_emb.inv_freq.device)
    if rank.last_stage:
        hand_out_hidden_states(model)
    return model if config.use_cpu_initialization else model.cuda(torch.cuda.current_device())


def output_weight(model: GPTModel) -> torch.Tensor:
    """The rows of the output projection on this TP rank: [V_padded / tp, h]."""
    if model.share_embeddings_and_output_weights:
        return model.shared_embedding_or_output_weight()
    return model.output_layer.weight
