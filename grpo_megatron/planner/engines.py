"""GPU memory that weights and KV cache take on each rank of an engine."""

from functools import cache
from math import prod

import torch

from grpo_megatron.config.engine import EngineConfig, KVCacheDtype
from grpo_megatron.config.schema import Config
from grpo_megatron.model.architecture import Architecture
from grpo_megatron.model.engine_entries import engine_entries, engine_shapes
from grpo_megatron.model.entries import EngineLayout
from grpo_megatron.model.families import weight_map

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def engine_dtype(arch: Architecture, engine: EngineConfig) -> torch.dtype:
    """Return the dtype in which the engine computes: rollout.engine.dtype, or for `auto` the model's."""
    return _DTYPES.get(engine.dtype, arch.dtype)


def engine_weight_bytes(arch: Architecture, engine: EngineConfig) -> int:
    """Return the bytes of the weights on one rank of an engine."""
    return sum(_weight_bytes(arch, EngineLayout.from_config(engine), engine_dtype(arch, engine).itemsize))


def engine_expert_bytes(arch: Architecture, engine: EngineConfig) -> int:
    """Return the bytes of the routed experts' weights on one rank of an engine."""
    return _weight_bytes(arch, EngineLayout.from_config(engine), engine_dtype(arch, engine).itemsize)[1]


@cache
def _weight_bytes(arch: Architecture, layout: EngineLayout, itemsize: int) -> tuple[int, int]:
    """Return (bytes without routed experts, bytes of routed experts) of the weights on one engine rank.

    itemsize: bytes of an element of most weights. Some weights have a fixed dtype, and so another size.
    """
    entries = engine_entries((entry for entry in weight_map(arch).values() if entry.exported), layout)
    itemsizes = {entry.engine: entry.engine_dtype.itemsize for entry in entries if entry.engine_dtype}
    experts = {entry.engine for entry in entries if entry.expert}
    found = [0, 0]
    for name, shape in engine_shapes(entries, layout).items():
        found[name in experts] += itemsizes.get(name, itemsize) * prod(shape)
    return found[0], found[1]


def fp32_head_bytes(arch: Architecture, config: Config) -> int:
    """Return the bytes of the output layer's float32 copy, which an engine rank makes in each decoding step.

    The result is 0 unless model.fp32_head is set.
    """
    return (
        4 * arch.vocab_size * arch.hidden_size // config.rollout.engine.tensor_parallel
        if config.model.fp32_head
        else 0
    )


def kv_bytes_per_token(arch: Architecture, engine: EngineConfig) -> int:
    """Return the bytes that one token takes in the KV cache of an engine rank.

    The cache has a key and a value for each of the rank's KV heads in each layer. With latent attention, it
    has the token's latents of each layer instead, complete on every rank.
    """
    size = engine_dtype(arch, engine).itemsize if engine.kv_cache_dtype == KVCacheDtype.auto else 1
    if arch.latent:
        return size * arch.num_layers * (arch.latent.kv_rank + arch.latent.rotated_dim)
    attention_tp = EngineLayout.from_config(engine).attention_tp
    return size * arch.num_layers * 2 * max(1, arch.num_kv_heads // attention_tp) * arch.head_dim


def kv_tokens(arch: Architecture, engine: EngineConfig, pool: int) -> int:
    """Return the number of tokens for which the KV cache of one engine has room.

    With data-parallel attention, the ranks of an engine form groups that cache the tokens of different
    requests, so the capacities of the groups add up. rollout.engine.max_total_tokens limits the capacity of
    each group.

    pool: bytes on each GPU that weights and KV cache may take together. If the weights alone need more, the
        result is 0.
    """
    of_a_group = max(0, pool - engine_weight_bytes(arch, engine)) // kv_bytes_per_token(arch, engine)
    if engine.max_total_tokens is not None:
        of_a_group = min(of_a_group, engine.max_total_tokens)
    return of_a_group * engine.data_parallel_attention
