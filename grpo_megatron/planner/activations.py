"""Bytes that a micro-batch takes on a rank: activations and the buffers of the output layer.

These bytes are the activations kept for the backward pass, the layer that is being computed, and the tiles
of the output layer. The method follows Korthikanti et al., "Reducing Activation Recomputation in Large
Transformer Models" (arXiv:2205.05198), sections 4 and 5, with three differences: attention is a flash kernel,
which keeps no probabilities (as with their selective recomputation); there is no dropout; the MLP has a gate.
An element that several layers keep is counted once for each of these layers. For gated delta networks, what
megatron.layers.delta_net keeps is counted.
"""

from collections import Counter
from functools import cache
from typing import NamedTuple

from grpo_megatron.algorithm.kl import FULL_KL
from grpo_megatron.config.schema import Config, MegatronConfig, Recompute
from grpo_megatron.model.architecture import Architecture, DeltaNet
from grpo_megatron.model.parallel_sizes import ParallelSizes
from grpo_megatron.planner.states import itemsize

# Size of a tile of logits in megatron.head.tiles on a GPU: its elements, and the number of vocabulary entries
# in a tile with the largest number of tokens.
_TILE_ELEMENTS, _TILE_WORDS = 32 << 20, 8192
# Tokens of a chunk in megatron.layers.delta_rule.
_CHUNK = 64


class LayerKind(NamedTuple):
    """Kind of a transformer layer.

    has_experts: True if its MLP is a mixture of experts.
    is_recurrent: True for a gated delta network, False for attention.
    """

    has_experts: bool = False
    is_recurrent: bool = False


def layer_activations(
    arch: Architecture, megatron: MegatronConfig, kind: LayerKind, recomputed: frozenset[str]
) -> float:
    """Return the bytes of activations that a rank keeps of one layer for the backward pass, per token.

    The activations of projections are divided among the tensor-parallel ranks. The inputs and outputs of
    norms and of the router are divided only with sequence parallelism; otherwise each rank keeps them whole.
    All experts are assumed to receive equally many tokens.

    recomputed: modules that are recomputed in the backward pass, so that only their inputs are kept: mlp,
        moe, moe_act, layernorm, core_attn. In attention, core_attn makes no difference, because the flash
        kernel keeps nothing.
    """
    sizes, size = ParallelSizes.from_config(megatron), itemsize(megatron)
    share = 1 / sizes.tp if sizes.sequence_parallel else 1
    # Inputs and outputs of the two norms, and inputs of the norms after attention and MLP.
    norms = (2 if "layernorm" in recomputed else 4) + (2 if arch.output_norms else 0)
    elements = norms * arch.hidden_size * share
    if not kind.is_recurrent:
        elements += _attention_elements(arch, sizes)
    if not kind.has_experts:
        elements += 0 if "mlp" in recomputed else 3 * arch.ffn_hidden_size / sizes.tp
    elif "moe" not in recomputed:
        moe = arch.moe
        # Each expert of a token keeps: input, gate and up, activated, output. The router is in float32.
        copy = 2 * arch.hidden_size + (2 if "moe_act" in recomputed else 3) * moe.ffn_hidden_size / sizes.etp
        elements += (
            share * (moe.top_k * sizes.etp * copy + 2 * moe.num_experts)
            + 3 * moe.shared_ffn_hidden_size / sizes.tp
        )
    mixer = delta_bytes(arch.delta, sizes.tp, size, "core_attn" in recomputed) if kind.is_recurrent else 0
    return elements * size + mixer


def delta_bytes(delta: DeltaNet, tp: int, size: int, core_recomputed: bool) -> float:
    """Return the bytes that a rank keeps of one gated delta network for the backward pass, per token.

    The input of the input projection is not included, because it is the output of the layer's norm.

    size: bytes of an element of the projections.
    core_recomputed: True if everything between the two projections is recomputed.
    """
    keys, values = delta.key_rows / tp, delta.value_rows / tp
    key_heads, value_heads = delta.key_heads / tp, delta.value_heads / tp
    if core_recomputed:
        return size * (2 * keys + 3 * values + 2 * value_heads)
    # In float32: the convolution's inputs, once for each of its weights, and its sum.
    elements = (delta.kernel + 1) * (2 * keys + values)
    # Queries and keys: before and after normalisation, scaled, and copied for products within a chunk.
    elements += 10 * keys
    # Values, changes of the state, and of the norm its input, result and gate, before and after activations.
    elements += 8 * values
    # Queries and keys of each value head: with the decays, and resolved.
    elements += 3 * value_heads * delta.key_dim
    # Matrices of a chunk, and the state between chunks.
    elements += _CHUNK * (4 * value_heads + 2 * key_heads) + values * delta.key_dim / _CHUNK
    return 4 * elements + size * values


def _attention_elements(arch: Architecture, sizes: ParallelSizes) -> float:
    """Count the elements that a rank keeps of one layer's attention for the backward pass, per token.

    These elements are queries, keys, values and the output. If the model has norms of queries and keys, the
    inputs of these norms are kept too. With latent attention, the latents are kept before and after their
    norms.
    """
    if arch.latent is None:
        queries, keys = (
            arch.num_heads * arch.head_dim / sizes.tp,
            max(1, arch.num_kv_heads / sizes.tp) * arch.head_dim,
        )
        # The gate is kept in float32, and the gated output beside the output.
        gated = 3 * queries if arch.output_gate else 0
        return 2 * queries + 2 * keys + (queries + keys if arch.qk_norm else 0) + gated
    latent = arch.latent
    # Every rank keeps whole latents, before and after their norms.
    latents = 2 * (latent.kv_rank + (latent.query_rank or 0)) + latent.rotated_dim
    return latents + arch.num_heads / sizes.tp * (
        2 * (latent.plain_dim + latent.rotated_dim) + 2 * latent.value_dim
    )


def recomputed_modules(megatron: MegatronConfig) -> frozenset[str]:
    """Return the modules of a layer that selective recomputation computes again in the backward pass.

    An example is `mlp`. The set is empty unless megatron.recompute is `selective`.
    """
    return frozenset(megatron.recompute_modules if megatron.recompute == Recompute.selective else ())


def kept_by_layer(arch: Architecture, megatron: MegatronConfig, kind: LayerKind) -> float:
    """Return the bytes that a rank keeps of one layer for the backward pass, per token.

    megatron.recompute and megatron.recompute_modules decide what is kept. If the whole layer is recomputed,
    this is only the layer's input.
    """
    if megatron.recompute == Recompute.full:
        return (
            itemsize(megatron)
            * arch.hidden_size
            / (megatron.tensor_parallel if megatron.sequence_parallel else 1)
        )
    return layer_activations(arch, megatron, kind, recomputed_modules(megatron))


def kept_activations(arch: Architecture, config: Config, stage: int) -> int:
    """Return the peak bytes of activations that a rank of a pipeline stage keeps for backward passes.

    The rank keeps the activations of all micro-batches whose forward pass has begun and whose backward pass
    has not ended. With p stages, stage s (from 0) has begun p - s micro-batches in the 1F1B schedule
    (arXiv:2104.04473 section 2.2). With v > 1 chunks per stage, it has begun 2 (p - s - 1) + (v - 1) p + 1
    chunks of micro-batches (figure 4 of that paper, as Megatron schedules it).

    stage: index of the pipeline stage.
    """
    megatron, sizes = config.megatron, ParallelSizes.from_config(config.megatron)
    micro_batches = float(sizes.pp - stage)
    if sizes.vpp > 1:
        micro_batches = (2 * (sizes.pp - stage - 1) + (sizes.vpp - 1) * sizes.pp + 1) / sizes.vpp
    kinds = layers_of(arch, sizes)[stage]
    per_token = sum(count * kept_by_layer(arch, megatron, kind) for kind, count in kinds.items())
    return int(config.train.max_tokens_per_micro_batch * micro_batches * per_token)


def working_activations(arch: Architecture, config: Config, stage: int, backward: bool = True) -> int:
    """Return the temporary bytes that a rank needs while it computes one layer, beside the kept activations.

    The bytes are those of all activations of the layer, including recomputed ones, of the gradients of these
    activations, which are about as large, and of the layer's inputs gathered over the tensor-parallel ranks.

    stage: index of the pipeline stage.
    backward: False for a forward-only pass, which has no gradients.
    """
    kinds = layers_of(arch, ParallelSizes.from_config(config.megatron))[stage]
    whole = max(layer_activations(arch, config.megatron, kind, frozenset()) for kind in kinds)
    gathered = 4 * itemsize(config.megatron) * arch.hidden_size
    return int(config.train.max_tokens_per_micro_batch * ((2 if backward else 1) * whole + gathered))


def has_exact_kl(config: Config) -> bool:
    """Return True if the run uses the exact KL to the reference policy over the whole vocabulary.

    This is so with algorithm.use_kl_loss and algorithm.kl_loss_type=full. The last pipeline stage
    then keeps the reference's hidden states, and computes logits of the reference as well as of the policy.
    """
    return config.algorithm.use_kl_loss and config.algorithm.kl_loss_type == FULL_KL


class ReferenceHidden(NamedTuple):
    """Bytes that the last hidden states of the reference policy take on a rank of the last pipeline stage.

    on_device: bytes in the memory of the rank's device.
    on_host: bytes in host memory.
    """

    on_device: int
    on_host: int


def reference_hidden(arch: Architecture, config: Config) -> ReferenceHidden:
    """Return the bytes of the reference policy's last hidden states on a rank of the last pipeline stage.

    The exact KL needs these states for all samples of a step. At most ref.hidden_gib are on the device, and
    the rest is in host memory. Without the exact KL, both numbers are 0.
    """
    if not has_exact_kl(config):
        return ReferenceHidden(0, 0)
    megatron = config.megatron
    tokens = (
        config.data.train_batch_size
        * config.rollout.n
        * (config.data.max_prompt_length + config.rollout.max_response_length)
    )
    parts = megatron.data_parallel * megatron.context_parallel
    parts *= megatron.tensor_parallel if megatron.sequence_parallel else 1
    size = tokens * arch.hidden_size * itemsize(megatron) // parts
    on_device = min(int(config.ref.hidden_gib * 2**30), size)
    return ReferenceHidden(on_device, size - on_device)


def head_bytes(arch: Architecture, config: Config) -> int:
    """Return the bytes that the fused output layer needs on a rank of the last pipeline stage.

    The bytes are those of the layer's input and of the input's gradient (float32) for all tokens of the
    micro-batch, and of tiles of logits. The fused layer (megatron.head.fused) never makes a whole [tokens,
    vocabulary] tensor. With the exact KL and ref.offload, the reference's output weight is copied to the
    device too.
    """
    size, tokens = itemsize(config.megatron), config.train.max_tokens_per_micro_batch
    # Each projection has a tile of products. The gradient has another one, in the parameters' dtype.
    product = 4 if config.model.fp32_head else size
    tiles = _TILE_ELEMENTS * (product * (2 if has_exact_kl(config) else 1) + size)
    block = 4 * _TILE_WORDS * arch.hidden_size  # a tile times the input, for the weight's gradient
    tp = config.megatron.tensor_parallel
    weight = (
        size * arch.padded_vocab_size(tp) // tp * arch.hidden_size
        if has_exact_kl(config) and config.ref.offload
        else 0
    )
    # The exact KL also needs the reference's hidden states.
    inputs = tokens * arch.hidden_size * (2 * size if has_exact_kl(config) else size)
    return tiles + block + inputs + 4 * tokens * arch.hidden_size + weight


@cache
def layers_of(arch: Architecture, sizes: ParallelSizes) -> tuple[Counter[LayerKind], ...]:
    """Return, for each pipeline stage, how many layers of each kind it has."""
    experts = arch.moe.layers if arch.moe else (False,) * arch.num_layers
    recurrent = arch.delta.layers if arch.delta else (False,) * arch.num_layers
    return tuple(
        Counter(LayerKind(experts[layer], recurrent[layer]) for layer in layers)
        for layers in sizes.stage_layers(arch.num_layers)
    )
