"""Functions that the memory tests run on each rank."""

import torch

from grpo_megatron.megatron.actor import Actor
from grpo_megatron.megatron.state.hf_weights import local_parameters
from tests.parallel.actors import micro_batches


def _step(actor, batch, loss):
    parts = micro_batches(batch, actor.config, actor.rank.dp_rank, packing=True)[1]
    actor.passes.train_step(parts, loss, batch.num_tokens)


def _parameters(actor):
    with actor.model.settled_weights():
        return {name: p.detach().clone() for name, p in local_parameters(actor.model.chunks).items()}


def train(config, batches, loss, sleeping):
    """Return (parameters after a step on each batch, reports of the sleep before each step)."""
    actor = Actor(config)
    reports = []
    for batch in batches:
        if sleeping:
            reports.append(actor.memory.sleep())
            actor.memory.wake()
        _step(actor, batch, loss)
    return _parameters(actor), reports[1:]  # before the first step the optimizer has no states


def kept_for_backward(config, batch, loss):
    """Return (bytes that one micro-batch's forward pass keeps for the backward pass, without parameters;
    its tokens).
    """
    actor = Actor(config)
    _, (part,) = micro_batches(batch, config, 0, packing=True, max_tokens=batch.num_tokens)
    weights = {storage.data_ptr() for storage in actor.model.memory.parameters().values()}
    kept, backward = {}, []

    def keep(tensor):
        storage = tensor.untyped_storage()
        if not backward and storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    def hand_out(tensor):
        backward.append(True)  # what is computed again from here on is not counted
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, hand_out):
        actor.passes.compute_gradients([part], loss, batch.num_tokens)
    return sum(kept.values()), batch.num_tokens
