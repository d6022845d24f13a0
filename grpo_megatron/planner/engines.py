"""GPU memory that weights, KV cache and recurrent states take on each rank of an engine."""

from dataclasses import dataclass
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
# With the prefix cache, SGLang gives 0.9 bytes to recurrent states for each byte that it gives to the KV
# cache. A request may then need five states: its own, two in which its state is saved while it is decoded,
# and two of cached prefixes.
_STATES_SHARE, _STATES_PER_REQUEST = 0.9 / 1.9, 5


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
    exported = [entry for entry in weight_map(arch).values() if entry.exported]
    entries = engine_entries(exported, layout)
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

    The cache has a key and a value for each of the rank's KV heads in each layer with attention. With latent
    attention, it has the token's latents of each layer instead, complete on every rank.
    """
    size = engine_dtype(arch, engine).itemsize if engine.kv_cache_dtype == KVCacheDtype.auto else 1
    layers = arch.num_layers - arch.num_recurrent
    if arch.latent:
        return size * layers * (arch.latent.kv_rank + arch.latent.rotated_dim)
    attention_tp = EngineLayout.from_config(engine).attention_tp
    return size * layers * 2 * max(1, arch.num_kv_heads // attention_tp) * arch.head_dim


def kv_bytes_read(arch: Architecture, engine: EngineConfig, context: float) -> float:
    """Return the bytes that an engine rank reads from its KV cache to decode one token of a request.

    Layers with a sliding window read only the tokens within it. All other layers with attention read all
    tokens.

    context: number of tokens that the request has in the KV cache.
    """
    layers = arch.num_layers - arch.num_recurrent
    windows = [min(context, window) for window in arch.windows if window is not None]
    read = sum(windows) + (layers - len(windows)) * context
    return read / layers * kv_bytes_per_token(arch, engine)


def state_bytes(arch: Architecture, engine: EngineConfig) -> int:
    """Return the bytes that the recurrent states of one request take on an engine rank.

    A gated delta network has a float32 state for each of the rank's value heads, and the inputs of its
    convolution for the last kernel - 1 tokens, in bf16. The result is 0 for other models.
    """
    delta = arch.delta
    if delta is None:
        return 0
    convolved = (2 * delta.key_rows + delta.value_rows) * (delta.kernel - 1)
    of_a_layer = 4 * delta.value_rows * delta.key_dim + 2 * convolved
    return arch.num_recurrent * of_a_layer // EngineLayout.from_config(engine).attention_tp


@dataclass(frozen=True)
class EngineRoom:
    """Numbers of tokens and requests for which one engine has room, beside its weights.

    tokens: number of tokens in the KV cache.
    requests: number of requests that are decoded at once: rollout.engine.max_running_requests, or fewer if
        there is no room for the recurrent states of so many.
    state_bytes: bytes on each rank for recurrent states; 0 if the model has none.
    """

    tokens: int
    requests: int
    state_bytes: int = 0


def engine_room(arch: Architecture, engine: EngineConfig, pool: int) -> EngineRoom:
    """Return the numbers of tokens and requests for which one engine has room.

    With data-parallel attention, the ranks of an engine form groups that serve different requests, so the
    capacities of the groups add up. rollout.engine.max_total_tokens limits the KV cache of each group.

    SGLang divides the memory between recurrent states and KV cache: without the prefix cache, it keeps one
    state for each of max_running_requests, and with the prefix cache a fixed share of the memory.

    pool: bytes on each GPU that weights, KV cache and recurrent states may take together. If the weights
        alone need more, there is room for no token.
    """
    groups, requests = engine.data_parallel_attention, engine.max_running_requests
    rest, size, states = max(0, pool - engine_weight_bytes(arch, engine)), state_bytes(arch, engine), 0
    if size:
        # One more state is padding.
        states = max(1, requests // groups) + 1
        if engine.prefix_cache:
            states = int(_STATES_SHARE * rest) // size
            requests = min(requests, groups * (max(0, states - 1) // _STATES_PER_REQUEST))
    of_a_group = max(0, rest - states * size) // kv_bytes_per_token(arch, engine)
    if engine.max_total_tokens is not None:
        of_a_group = min(of_a_group, engine.max_total_tokens)
    return EngineRoom(of_a_group * groups, requests, states * size)
