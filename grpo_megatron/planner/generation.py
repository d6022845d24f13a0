"""Time of generation, by a cost model that has not been compared with measurements on a GPU.

A decoding step takes as long as its memory accesses or as its matrix products, whichever is longer (the
roofline model, Williams et al. 2009, doi:10.1145/1498765.1498785, as applied by Pope et al.,
arXiv:2211.05102). It reads the weights and the KV cache once, and reads and writes recurrent states.
"""

from math import ceil

from grpo_megatron.capabilities import GPUS
from grpo_megatron.config.engine import Quantization
from grpo_megatron.config.schema import Config
from grpo_megatron.model.architecture import Architecture
from grpo_megatron.planner.engines import (
    EngineRoom,
    engine_expert_bytes,
    engine_weight_bytes,
    fp32_head_bytes,
    kv_bytes_read,
    state_bytes,
)
from grpo_megatron.planner.lengths import Lengths
from grpo_megatron.planner.rates import (
    BANDWIDTH,
    FABRIC_SECONDS,
    LAYER_SECONDS,
    LINKS,
    NETWORK_SECONDS,
    PRODUCTS,
)


def generation_seconds(config: Config, arch: Architecture, room: EngineRoom, lengths: Lengths) -> float:
    """Estimate the seconds in which one engine generates its share of a step's responses.

    The engine decodes as many responses at once as its request slots and its memory (`room`) allow. A
    decoding step adds a token to each of these responses. One response is assumed to have the maximum length.
    So there are at least as many decoding steps as that response has tokens, and towards the end fewer
    responses are decoded at once.

    With rollout.staleness=S, the engine also decodes responses of the S batches that follow. The longest
    response may then take the time of S + 1 training steps.
    """
    engine, prompts = config.rollout.engine, config.data.train_batch_size
    responses = ceil(prompts * config.rollout.n / engine.num_engines)
    context = lengths.prompt + lengths.response / 2
    batches = config.rollout.staleness + 1
    slots = min(
        batches * responses,
        room.requests,
        config.rollout.max_concurrency,
        room.tokens / context,
    )
    steps = max(responses * lengths.response / slots, config.rollout.max_response_length / batches)
    prefill = (prompts if engine.prefix_cache else prompts * config.rollout.n) / engine.num_engines
    flops = prefill * float(arch.cost_model.flops([lengths.prompt])[0])
    rate = _engine_rate(config) * engine.tensor_parallel
    return steps * _decode_step(config, arch, responses * lengths.response / steps, context) + flops / rate


def _engine_rate(config: Config) -> float:
    """Return the speed in FLOP/s that matrix products are assumed to reach on one GPU of an engine."""
    speed = GPUS[config.cluster.gpu].speed
    fp8 = config.rollout.engine.quantization == Quantization.fp8
    return PRODUCTS * (speed.fp8 if fp8 and speed.fp8 else speed.bf16)


def _decode_step(config: Config, arch: Architecture, batch: float, context: float) -> float:
    """Estimate the seconds of one decoding step, which adds one token to each request.

    batch: number of requests that the engine decodes at once.
    context: mean number of tokens that each request has in the KV cache.
    """
    engine, speed = config.rollout.engine, GPUS[config.cluster.gpu].speed
    weights = engine_weight_bytes(arch, engine)
    if arch.moe:
        # An expert is read only if some token of the batch goes to it.
        untouched = (1 - arch.moe.top_k / arch.moe.num_experts) ** batch
        weights -= engine_expert_bytes(arch, engine) * untouched
    # Recurrent states are read and written.
    of_a_request = kv_bytes_read(arch, engine, context) + 2 * state_bytes(arch, engine)
    cache = batch / engine.data_parallel_attention * of_a_request
    flops = batch * arch.cost_model.flops_of_next_token(context)
    head = 2 * fp32_head_bytes(arch, config)  # written, and read by the product
    step = max(
        (weights + cache + head) / (BANDWIDTH * speed.memory),
        flops / engine.tensor_parallel / _engine_rate(config),
    )
    layer = LAYER_SECONDS
    if engine.tensor_parallel > 1:
        # Each layer has two all-reduces of hidden states. An all-reduce sends and receives about twice their
        # bytes.
        within = engine.tensor_parallel <= config.cluster.gpus_per_node
        link, latency = (speed.fabric, FABRIC_SECONDS) if within else (speed.network, NETWORK_SECONDS)
        layer += 2 * (latency + 2 * batch * arch.hidden_size * 2 / (LINKS * link))
    return step + arch.num_layers * layer
