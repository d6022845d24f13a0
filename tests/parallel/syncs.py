"""Functions that the tests of host synchronisations run on each rank."""

from contextlib import nullcontext

from grpo_megatron.algorithm.losses import TokenLoss
from grpo_megatron.batch.train_batch import TrainBatch
from grpo_megatron.config.schema import Config
from grpo_megatron.megatron.actor import Actor
from tests.host_syncs import host_syncs
from tests.streams import selected


def of_passes(config: Config, batch: TrainBatch, count: int, loss: TokenLoss) -> dict[str, list[str]]:
    """Return {pass: where the host would wait for the device} with `count` micro-batches that were laid out
    before.

    Every pass is done once before, so that what is computed once and kept is not counted.

    loss: with the exact KL, or without a reference.
    """
    actor, found, key = Actor(config), {}, (1, 0)
    parts = [selected(batch, [i, i + 1]) for i in range(0, 2 * count, 2)]
    tokens = sum(part.num_tokens for part in parts)
    passes = {
        "log-probs": lambda: actor.passes.logprobs(parts, key=key),
        "training": lambda: actor.passes.compute_gradients(parts, loss, tokens, key=key),
    }
    if config.algorithm.needs_reference:
        passes = {
            "reference": lambda: actor.passes.logprobs(parts, reference=True, key=key, keep_hidden=True)
        } | passes
    for name, make in passes.items():
        for _ in range(2):
            weights = actor.passes.reference() if name == "reference" else nullcontext()
            with weights, host_syncs() as syncs:
                make()
        found[name] = syncs.found
    return found
