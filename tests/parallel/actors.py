"""Functions that the parallel tests run on each rank. They must be importable by the pool."""

import numpy as np
import torch

from grpo_megatron.batch.layout import Layout
from grpo_megatron.batch.pairs import schedule_pairs
from grpo_megatron.batch.schedule import schedule
from grpo_megatron.batch.train_batch import TrainBatch
from grpo_megatron.config.schema import Config
from grpo_megatron.megatron.actor import Actor
from grpo_megatron.megatron.state.hf_weights import iterate_hf
from tests.configs import sizes_of
from tests.streams import selected, token_index


def micro_batches(
    batch: TrainBatch,
    config: Config,
    dp_rank: int,
    packing: bool,
    max_tokens: int = 160,
    pairs: bool = False,
) -> tuple:
    sizes = sizes_of(config)
    multiple = Layout(cp=sizes.cp).sequence_multiple
    plan = (schedule_pairs if pairs else schedule)(
        batch.lengths,
        max_tokens,
        dp=sizes.dp,
        packing=packing,
        sequence_multiple=multiple,
        multiple_of=sizes.micro_batch_multiple,
    )
    return plan, [selected(batch, mb) for mb in plan.micro_batches[dp_rank]]


def in_order(batch: TrainBatch, plan, actor: Actor, values: np.ndarray) -> np.ndarray:
    """Return a replica's values [..., t] at the places of its tokens in the batch, float32 [..., T], zero
    elsewhere.
    """
    out = np.zeros((*values.shape[:-1], batch.num_tokens), np.float32)
    out[..., token_index(batch, plan.sequences(actor.rank.dp_rank))] = values
    return out


def reference_logprobs(actor: Actor, parts: list[TrainBatch], **options) -> np.ndarray | None:
    """Return `Actor.logprobs` of the reference, whose weights are exchanged for this one pass."""
    with actor.passes.reference():
        return actor.passes.logprobs(parts, reference=True, **options)


def logprobs(config: Config, batch: TrainBatch, packing: bool, reference: bool = False):
    """Return the log-probs of all tokens of this replica's sequences, in the order of the batch."""
    actor = Actor(config)
    plan, parts = micro_batches(batch, config, actor.rank.dp_rank, packing)
    values = reference_logprobs(actor, parts) if reference else actor.passes.logprobs(parts)
    if not actor.rank.reports:
        return None
    return in_order(batch, plan, actor, values)


def probes(config: Config, batch: TrainBatch, temperature: float):
    """Return {probe: values [T] or [2, T] of this replica's sequences, zero elsewhere}."""
    actor = Actor(config)
    plan, parts = micro_batches(batch, config, actor.rank.dp_rank, packing=True)
    values = {"logprobs": actor.passes.logprobs(parts), "probe": actor.passes.probe(parts, temperature, None)}
    for dtype in (torch.float32, torch.bfloat16):
        values[dtype] = actor.passes.probe(parts, temperature, dtype)
    actor.weights.scale(2.0)
    values["doubled"] = actor.passes.probe(parts, temperature, None)
    actor.weights.scale(0.5)
    values["undone"] = actor.passes.probe(parts, temperature, None)
    if not actor.rank.reports:
        return None
    return {name: in_order(batch, plan, actor, value) for name, value in values.items()}


def round_trip(config: Config, folder: str, dtype):
    """Convert HF -> Megatron -> HF."""
    Actor(config).weights.save_hf(folder, dtype)


def exported_tensors(config: Config):
    """Return {HF name: tensor} on ranks that export it, {} elsewhere."""
    actor = Actor(config)
    tensors = iterate_hf(actor.model.chunks, actor.model.entries)
    return {name: tensor.detach().clone() for name, tensor in tensors}


def logprobs_and_round_trip(config: Config, batch: TrainBatch, folder: str):
    """Return one actor's log-probs of the batch, and export it as HF to `folder`."""
    actor = Actor(config)
    plan, parts = micro_batches(batch, config, actor.rank.dp_rank, packing=True)
    values = actor.passes.logprobs(parts)
    actor.weights.save_hf(folder)
    if not actor.rank.reports:
        return None
    return in_order(batch, plan, actor, values)


def train_with_reference(config: Config, batches: list[TrainBatch], loss):
    """Do optimizer steps with a reference pass before each."""
    actor = Actor(config)
    results = []
    for batch in batches:
        _, parts = micro_batches(batch, config, actor.rank.dp_rank, packing=True)
        before = reference_logprobs(actor, parts)
        results.append(actor.passes.train_step(parts, loss, step_tokens=batch.num_tokens))
        after = reference_logprobs(actor, parts)
        assert np.array_equal(before, after), "training moved the reference"
    return results if actor.rank.reports else None


def broken_weights(config, batch):
    """Return what `weights.broken` reports before and after a NaN is put into the last rank's last
    parameter.
    """
    actor = Actor(config)
    sound = actor.weights.broken()
    name, parameter = list(actor.model.chunks[-1].named_parameters())[-1]
    if actor.rank.rank == sizes_of(config).world_size - 1:
        with torch.no_grad():
            parameter.view(-1)[-1] = torch.nan
    return sound, actor.weights.broken(), name
