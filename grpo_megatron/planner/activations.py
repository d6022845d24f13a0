"""Bytes of a rank that a micro-batch takes: what layers keep for the backward pass, what is being computed, the output layer's tiles.

After Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models" (arXiv:2205.05198), sections 4 and 5, with
three differences: attention is a flash kernel, which keeps no probabilities (as with their selective recomputation); there is no dropout;
the MLP has a gate. Elements are counted once each where a layer keeps them.
"""

from functools import cache
from typing import NamedTuple

from grpo_megatron.config.schema import Config, MegatronConfig, Recompute
from grpo_megatron.model.architecture import Architecture
from grpo_megatron.model.parallel_sizes import ParallelSizes
from grpo_megatron.planner.states import itemsize

# Tiles of megatron.fused_head on a GPU: float32 logits, and the words of a tile that spans as many tokens as it may.
_TILE_BYTES, _TILE_WORDS = 128 << 20, 8192


def layer_activations(
    arch: Architecture, megatron: MegatronConfig, has_experts: bool, recomputed: frozenset[str]
) -> float:
    """Bytes for each token of a rank's micro-batch that one layer keeps for its backward pass.

    recomputed: the parts whose inputs alone are kept, of mlp, moe, moe_act and layernorm; core_attn keeps nothing in any case. Of a
    token each tensor-parallel rank has its part of every projection, and with sequence parallelism of what norms and router take and
    give. Experts: as many tokens for each as an even router sends.
    """
    sizes = ParallelSizes.from_config(megatron)
    share = 1 / sizes.tp if sizes.sequence_parallel else 1
    # What the two norms take, and what they give.
    elements = (2 if "layernorm" in recomputed else 4) * arch.hidden_size * share + _attention_elements(
        arch, sizes
    )
    if not has_experts:
        elements += 0 if "mlp" in recomputed else 3 * arch.ffn_hidden_size / sizes.tp
    elif "moe" not in recomputed:
        moe = arch.moe
        # A token's copy for each of its experts: in, gate and up, activated, out. The router is in float32.
        copy = 2 * arch.hidden_size + (2 if "moe_act" in recomputed else 3) * moe.ffn_hidden_size / sizes.etp
        elements += (
            share * (moe.top_k * sizes.etp * copy + 2 * moe.num_experts)
            + 3 * moe.shared_ffn_hidden_size / sizes.tp
        )
    return elements * itemsize(megatron)


def _attention_elements(arch: Architecture, sizes: ParallelSizes) -> float:
    """Queries, keys and values, once more before their norms, and what attention gives."""
    if arch.latent is None:
        queries, keys = (
            arch.num_heads * arch.head_dim / sizes.tp,
            max(1, arch.num_kv_heads / sizes.tp) * arch.head_dim,
        )
        return 2 * queries + 2 * keys + (queries + keys if arch.qk_norm else 0)
    latent = arch.latent
    # Every rank has all of the latents, before and after their norms.
    latents = 2 * (latent.kv_rank + (latent.query_rank or 0)) + latent.rotated_dim
    return latents + arch.num_heads / sizes.tp * (
        2 * (latent.plain_dim + latent.rotated_dim) + 2 * latent.value_dim
    )


def recomputed_modules(megatron: MegatronConfig) -> frozenset[str]:
    """The parts of a layer that are computed again; of whole layers see megatron.recompute."""
    return frozenset(megatron.recompute_modules if megatron.recompute == Recompute.selective else ())


def kept_by_layer(arch: Architecture, megatron: MegatronConfig, has_experts: bool) -> float:
    """As `layer_activations`, with what megatron.recompute leaves of it; of a layer that is recomputed whole, its input."""
    if megatron.recompute == Recompute.full:
        return (
            itemsize(megatron)
            * arch.hidden_size
            / (megatron.tensor_parallel if megatron.sequence_parallel else 1)
        )
    return layer_activations(arch, megatron, has_experts, recomputed_modules(megatron))


def kept_activations(arch: Architecture, config: Config, stage: int) -> int:
    """Bytes that a rank of a pipeline stage keeps when it keeps most: of all micro-batches that it has begun and not ended.

    1F1B (arXiv:2104.04473 section 2.2): the first stage begins as many micro-batches as there are stages, before it ends one.
    With v chunks a stage it has begun 2 (p - stage - 1) + (v - 1) p + 1 of them by chunks (their figure 4, as Megatron schedules it).
    """
    megatron, sizes = config.megatron, ParallelSizes.from_config(config.megatron)
    micro_batches = float(sizes.pp - stage)
    if sizes.vpp > 1:
        micro_batches = (2 * (sizes.pp - stage - 1) + (sizes.vpp - 1) * sizes.pp + 1) / sizes.vpp
    dense, experts = layers_of(arch, sizes)[stage]
    per_token = sum(
        count * kept_by_layer(arch, megatron, kind)
        for count, kind in ((dense, False), (experts, True))
        if count
    )
    return int(config.train.max_tokens_per_micro_batch * micro_batches * per_token)


def working_activations(arch: Architecture, config: Config, stage: int, backward: bool = True) -> int:
    """Bytes of the layer whose backward pass is being computed: all that it keeps, now computed again where it was not kept,
    gradients of about the same size, and its inputs gathered over the tensor-parallel ranks.

    backward: else of a layer in a pass that keeps nothing, which has no gradients.
    """
    dense, experts = layers_of(arch, ParallelSizes.from_config(config.megatron))[stage]
    kinds = [kind for count, kind in ((dense, False), (experts, True)) if count]
    whole = max(layer_activations(arch, config.megatron, kind, frozenset()) for kind in kinds)
    gathered = 4 * itemsize(config.megatron) * arch.hidden_size
    return int(config.train.max_tokens_per_micro_batch * ((2 if backward else 1) * whole + gathered))


def has_exact_kl(config: Config) -> bool:
    """For which the last stage keeps the reference's hidden states, and makes the reference's logits beside the policy's."""
    return config.algorithm.needs_reference and config.algorithm.kl_loss_type == "full"


class ReferenceHidden(NamedTuple):
    """Bytes of a rank of the last stage."""

    on_device: int
    on_host: int


def reference_hidden(arch: Architecture, config: Config) -> ReferenceHidden:
    """The reference's hidden states of all of a replica's samples, which the exact KL keeps from the reference's passes to the
    end of the step: as many as ref.hidden_gib lets on the device, the rest on the host. See MiniBatchStore.keep_hidden."""
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
    """Bytes of the fused output layer on the last stage: its input and the input's gradient (float32) for all tokens of the
    micro-batch, and tiles of logits: there is never a [tokens, vocabulary] tensor. See megatron.fused_head. With the exact KL of
    a reference on the host, its output weight is copied to the device for the time of the passes (Actor.compute_gradients)."""
    size, tokens = itemsize(config.megatron), config.train.max_tokens_per_micro_batch
    # Logits in float32 and in the parameters' dtype, and scratch; once more for the reference's with the exact KL.
    tiles = 3 * _TILE_BYTES if size == 4 else 5 * _TILE_BYTES // 2
    block = 4 * _TILE_WORDS * arch.hidden_size  # product of a tile with the input, for the weight's gradient
    tp = config.megatron.tensor_parallel
    weight = (
        size * arch.padded_vocab_size(tp) // tp * arch.hidden_size
        if has_exact_kl(config) and config.ref.offload
        else 0
    )
    inputs = tokens * arch.hidden_size * (2 * size if has_exact_kl(config) else size)  # of the reference too
    return tiles + block + inputs + 4 * tokens * arch.hidden_size + weight


def layers_of(arch: Architecture, sizes: ParallelSizes) -> tuple[tuple[int, int], ...]:
    """Layers of each pipeline stage: (without experts, with)."""
    return _layers_of(arch, sizes.chunk_layers(arch.num_layers), sizes.pp)


@cache
def _layers_of(arch: Architecture, chunks: tuple[int, ...], pp: int) -> tuple[tuple[int, int], ...]:
    experts = arch.moe.layers if arch.moe else (False,) * arch.num_layers
    found, first = [[0, 0] for _ in range(pp)], 0
    for chunk, layers in enumerate(chunks):
        for has_experts in experts[first : first + layers]:
            found[chunk % pp][has_experts] += 1
        first += layers
    return tuple((dense, with_experts) for dense, with_experts in found)
