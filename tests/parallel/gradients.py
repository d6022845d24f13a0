"""Functions that tests of accumulated gradients run on each rank."""

from dataclasses import dataclass

import numpy as np
import torch

from grpo_megatron.algorithm.losses import TokenLoss
from grpo_megatron.batch.train_batch import TrainBatch
from grpo_megatron.config.schema import Config
from grpo_megatron.megatron.actor import Actor
from grpo_megatron.megatron.results import AdamOptions
from grpo_megatron.megatron.state.hf_weights import iterate_hf
from tests.parallel.actors import in_order, micro_batches


@dataclass
class Accumulated:
    """Result of one rank: the gradient norm of each step, and the weights that it exports."""

    norms: list[float]
    """Gradient norm of each step."""
    tensors: dict[str, torch.Tensor]
    """{HF name: weight} at the end."""
    logprobs: np.ndarray | None = None
    """float32 [T], log-probs that the first training pass returned."""
    fresh: np.ndarray | None = None
    """float32 [T], log-probs of a forward pass before it."""
    loss: float | None = None
    """Loss of the first pass."""


def _weights(actor: Actor) -> dict[str, torch.Tensor]:
    with actor.model.settled_weights():
        tensors = iterate_hf(actor.model.chunks, actor.model.entries)
        return {name: tensor.detach().clone() for name, tensor in tensors}


def together(config: Config, batches: list[TrainBatch], loss: TokenLoss):
    """Return (gradient norms, weights) after an optimizer step on each batch, each in one call."""
    actor = Actor(config)
    norms = []
    for batch in batches:
        _, parts = micro_batches(batch, config, actor.rank.dp_rank, packing=True)
        norms.append(actor.passes.train_step(parts, loss, step_tokens=batch.num_tokens).grad_norm)
    return norms, _weights(actor)


def accumulated(
    config: Config, calls: list[TrainBatch], loss: TokenLoss, with_logprobs: bool = False
) -> Accumulated:
    """Take two optimizer steps, each on the gradients of all calls.

    with_logprobs: compare the log-probs of the first call with those of a forward pass.
    """
    actor = Actor(config)
    result = Accumulated([], {})
    for step in range(2):
        for batch in calls:
            plan, parts = micro_batches(batch, config, actor.rank.dp_rank, packing=True)
            fresh = actor.passes.logprobs(parts) if with_logprobs and not step else None
            added = actor.gradients.add(parts, loss, batch.num_tokens, current_is_old=False)
            if fresh is not None and added:
                metrics, logprobs = added
                result.loss = float(metrics["actor/loss"].value)
                result.logprobs = in_order(batch, plan, actor, logprobs)
                result.fresh = in_order(batch, plan, actor, fresh)
        outcome = actor.gradients.step(AdamOptions(), drop=False)
        assert not outcome.dropped
        result.norms.append(outcome.grad_norm)
    result.tensors = _weights(actor)
    return result
