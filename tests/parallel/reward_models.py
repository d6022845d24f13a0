"""Functions that the tests of reward models run on each rank."""

from contextlib import nullcontext

import numpy as np

from grpo_megatron.algorithm.losses import CrossEntropyLoss
from grpo_megatron.batch.examples import ExampleBatch
from grpo_megatron.batch.pairs import PairBatch
from grpo_megatron.config.command import Command
from grpo_megatron.config.schema import Config
from grpo_megatron.megatron.actor import Actor
from tests.parallel.actors import micro_batches
from tests.parallel.invariance import planted


def scores(
    config: Config, batch: PairBatch, folder: str | None = None, fault: str | None = None
) -> np.ndarray | None:
    """Return the scores of this replica's sequences in the order of the batch, zero elsewhere.

    folder: folder to export the model to before, or None.
    fault: see invariance.FAULTS.
    """
    with planted(fault) if fault else nullcontext():
        actor = Actor(config, Command.reward_model)
        if folder:
            actor.weights.save_hf(folder)
        plan, parts = micro_batches(batch, config, actor.rank.dp_rank, packing=True, pairs=True)
        values = actor.passes.scores(parts)
    if values is None:
        return None
    out = np.zeros(batch.num_sequences, np.float32)
    out[plan.sequences(actor.rank.dp_rank)] = values
    return out


def scores_beside_a_policy(config: Config, batch: ExampleBatch) -> dict[str, np.ndarray] | None:
    """Return scores before and after an optimizer step of the policy, and the policy's log-probs around
    the first of them.
    """
    actor = Actor(config)
    plan, parts = micro_batches(batch, config, actor.rank.dp_rank, packing=True)
    found = {
        "logprobs": actor.passes.logprobs(parts),
        "scores": actor.passes.scores(parts),
        "logprobs again": actor.passes.logprobs(parts),
    }
    result = actor.passes.train_step(parts, CrossEntropyLoss(), batch.num_tokens)
    found |= {
        "later": actor.passes.scores(parts),
        "trained": actor.passes.logprobs(parts),
        "order": plan.sequences(actor.rank.dp_rank),
    }
    if not actor.rank.reports:
        return None
    assert not result.dropped
    return found
