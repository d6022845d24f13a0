"""Functions that the tests of adapters run on each rank."""

import zlib

import torch
from megatron.core import parallel_state as mpu

from grpo_megatron.errors import UserError
from grpo_megatron.megatron.actor import Actor
from grpo_megatron.megatron.layers.lora import MergedWeights
from grpo_megatron.megatron.state.hf_weights import iterate_hf, local_parameters
from tests.parallel.actors import in_order, micro_batches, reference_logprobs


@torch.no_grad()
def fill(actor: Actor) -> None:
    """Fill B with random values that are the same in every layout.

    Zeros, as at the start of a run, would hide A.
    """
    group = mpu.get_tensor_model_parallel_group()
    for name, parameter in local_parameters(actor.model.chunks, adapters=True).items():
        entry = actor.model.adapters[name]
        if name.endswith(".lora_b"):
            for piece in entry.megatron_pieces(group.size(), group.rank()):
                shape = entry.shapes[entry.hf.index(piece.hf)]
                whole = (
                    torch.randn(shape, generator=torch.Generator().manual_seed(zlib.crc32(piece.hf.encode())))
                    / 10
                )
                piece.of(parameter).copy_(
                    whole[tuple(slice(a, a + n) for a, n in zip(piece.start, piece.shape, strict=True))]
                )


def logprobs_and_export(config, batch, folder):
    """Return (log-probs with the adapters, log-probs of the reference), and export to `folder`."""
    actor = Actor(config)
    base = {name: p.detach().clone() for name, p in local_parameters(actor.model.chunks).items()}
    fill(actor)
    plan, parts = micro_batches(batch, config, actor.rank.dp_rank, packing=True)
    adapted, reference = actor.passes.logprobs(parts), reference_logprobs(actor, parts)
    actor.weights.save_hf(folder)
    assert all(torch.equal(base[name], p) for name, p in local_parameters(actor.model.chunks).items()), (
        "the model is frozen"
    )
    if not actor.rank.reports:
        return None
    return in_order(batch, plan, actor, adapted), in_order(batch, plan, actor, reference)


def memory_after_a_step(config, batch, loss):
    """Return memory figures after a step.

    They are bytes by kind, the elements of the adapters, of the model and of the reference's memory, and the
    merged weights that changed.
    """
    actor = Actor(config)
    before = {name: p.detach().clone() for name, p in local_parameters(actor.model.chunks).items()}
    _, parts = micro_batches(batch, config, actor.rank.dp_rank, packing=True)
    actor.passes.train_step(parts, loss, batch.num_tokens)
    after = MergedWeights(actor.model.chunks)
    changed = [name for name in before if not torch.equal(before[name], after[name])]
    sizes = [
        sum(p.numel() for p in local_parameters(actor.model.chunks, adapters=a).values())
        for a in (True, False)
    ]
    return actor.model.memory.resident(), *sizes, actor.model.reference.nbytes // 4, changed


def _step(actor, batch, loss):
    _, parts = micro_batches(batch, actor.config, actor.rank.dp_rank, packing=True)
    actor.passes.train_step(parts, loss, batch.num_tokens)
    return {
        name: p.detach().clone() for name, p in local_parameters(actor.model.chunks, adapters=True).items()
    }


def train_and_save(config, batches, loss, folder):
    """Return the adapters after a step on each batch.

    The checkpoint in `folder` has those after the first step.
    """
    actor = Actor(config)
    fill(actor)
    found = [_step(actor, batches[0], loss)]
    actor.checkpoints.begin(folder)
    actor.checkpoints.finish()
    return found + [_step(actor, batch, loss) for batch in batches[1:]]


def load_and_train(config, batches, loss, folder):
    """Return the adapters of the checkpoint, and after a step on each batch."""
    actor = Actor(config)
    actor.checkpoints.load(folder)
    loaded = {
        name: p.detach().clone() for name, p in local_parameters(actor.model.chunks, adapters=True).items()
    }
    return [loaded] + [_step(actor, batch, loss) for batch in batches]


def refusal(config, folder):
    """Return the message with which loading refuses the checkpoint, or None."""
    try:
        Actor(config).checkpoints.load(folder)
    except UserError as error:
        return str(error)


def merged_weights(config):
    """Return {HF name: tensor with its adapter merged} of the tensors that this rank exports."""
    actor = Actor(config)
    fill(actor)
    merged = MergedWeights(actor.model.chunks)
    tensors = iterate_hf(actor.model.chunks, actor.model.entries, values=merged)
    return {name: tensor.clone() for name, tensor in tensors}
