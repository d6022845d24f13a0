"""Functions that the routing-replay tests run on each rank."""

import torch
from megatron.core import parallel_state as mpu

from grpo_megatron.megatron.actor import Actor
from grpo_megatron.megatron.layers.router import routers
from tests.parallel.actors import micro_batches
from tests.streams import token_index


def _flip(actor) -> None:
    for chunk in actor.model.chunks:
        for _, router in routers(chunk):
            router.weight.data.neg_()


def _train(actor, parts, batch, loss, key):
    """Return (sum, count) of the entropy, on reporting ranks."""
    metrics = actor.passes.compute_gradients(parts, loss, batch.num_tokens, key=key)
    return (metrics["actor/entropy"].total, metrics["actor/entropy"].count) if actor.rank.reports else None


def record_flip_train(config, batch, loss):
    """Return the entropy of training with flipped routers, and the routing recorded before.

    The routing is {layer: (tokens of the batch, their experts)}.
    """
    actor = Actor(config)
    plan, parts = micro_batches(batch, config, actor.rank.dp_rank, packing=True)
    actor.passes.logprobs(parts, key=(1, 0))
    recorded = {}
    for part, kept in zip(
        plan.micro_batches[actor.rank.dp_rank], actor.passes.prepared.get((1, 0), parts), strict=True
    ):
        local = torch.from_numpy(kept.pack.index)
        index = kept.pack.layout.tensor_parallel_share(local, mpu.get_tensor_model_parallel_rank()).numpy()
        tokens = token_index(batch, part)[index[index >= 0]]
        for layer, chosen in kept.routing.items():
            recorded.setdefault(layer, []).append((tokens, chosen.numpy()[index >= 0]))
    _flip(actor)
    entropy = _train(actor, parts, batch, loss, (1, 0))
    joined = {
        layer: tuple(map(_concatenate, zip(*pieces, strict=True))) for layer, pieces in recorded.items()
    }
    return entropy, joined


def _concatenate(arrays):
    return torch.cat([torch.from_numpy(array) for array in arrays]).numpy()


def flip_train(config, batch, loss):
    actor = Actor(config)
    _flip(actor)
    parts = micro_batches(batch, config, actor.rank.dp_rank, packing=True)[1]
    return _train(actor, parts, batch, loss, (1, 0)), None
