"""What the memory tests run on each rank."""

from grpo_megatron.megatron.actor import Actor
from grpo_megatron.megatron.weights import local_parameters
from tests.parallel.actors import micro_batches


def _step(actor, batch, loss):
    parts = micro_batches(batch, actor.spec, actor.rank.dp_rank, packing=True)[1]
    actor.train_step(parts, loss, batch.num_tokens)


def _parameters(actor):
    with actor._settled_weights():
        return {name: p.detach().clone() for name, p in local_parameters(actor.chunks).items()}


def train(spec, batches, loss, sleeping):
    """(parameters after a step on each batch, what sleeping before each step reported)."""
    actor = Actor(spec)
    reports = []
    for batch in batches:
        if sleeping:
            reports.append(actor.sleep())
            actor.wake()
        _step(actor, batch, loss)
    return _parameters(actor), reports[1:]  # before the first step the optimizer has no states
