"""`grpo-megatron reward-model`: trains a reward model on pairs of a preferred and a rejected response.

It uses the trainer of `train`, with a scalar head on the model and a loss on pairs.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from grpo_megatron.algorithm.preferences import PairInputs, PreferenceLoss
from grpo_megatron.batch.pairs import Pair, PairBatch
from grpo_megatron.batch.schedule import Schedule
from grpo_megatron.commands.assemble import Run, RunContext, assemble, open_run, run_with_restarts
from grpo_megatron.commands.supervised import SupervisedTraining
from grpo_megatron.config.command import Command
from grpo_megatron.config.schema import Config
from grpo_megatron.data import EpochOrder, PromptTokenizer
from grpo_megatron.data.conversations import Conversations, pad_token
from grpo_megatron.data.preferences import load_pairs
from grpo_megatron.metrics import to_floats
from grpo_megatron.preflight.check import check_start
from grpo_megatron.run.guard import Guard
from grpo_megatron.run.resume import Checkpoint, finished_result
from grpo_megatron.trainer.mini_batch import enough, partition

logger = logging.getLogger(__name__)


def reward_model(config: Config, guard: Guard | None = None) -> dict[str, Any]:
    """Train a reward model on the pairs (preferred and rejected response) of data.train.

    With checkpoint.export_hf, the model is also exported. Returns a dict, which is also written to
    result.json in the run's folder: the last step, the last loss, the scores on data.eval, and the paths of
    all outputs (see `Run.finish`). If an earlier start of this command has finished the run, nothing is
    trained, and the result of the earlier start is returned. Raises Stopped if the run was asked to stop.

    guard: receives requests to stop; None: the run is never asked to stop.
    """
    if result := finished_result(config, Command.reward_model):
        return result
    check_start(config, Command.reward_model)
    conversations = Conversations(
        PromptTokenizer(config.model.path, config.data), pad_token(config.model.path)
    )
    training = _load("data.train", config.data.train, conversations, config)
    held_out = _load("data.eval", config.data.eval, conversations, config) if config.data.eval else []

    def attempt(context: RunContext, checkpoint: Checkpoint | None) -> dict[str, Any]:
        with assemble(context, checkpoint) as run:
            return run.finish(_Training(run, training, held_out).train(context.guard.stop))

    order = EpochOrder.of(training, config.run.seed, config.data.shuffle)
    with open_run(
        config, Command.reward_model, guard, lambda state: order.must_fit(state["order"])
    ) as context:
        return run_with_restarts(context, attempt)


def _load(key: str, sources: Any, conversations: Conversations, config: Config) -> Sequence[Pair]:
    pairs, counts = load_pairs(sources, conversations, config.data, config.rollout.max_response_length)
    left_out = "".join(f", {count} left out {why}" for why, count in counts.items() if count)
    logger.info(f"{key}: {len(pairs)} pairs{left_out}")
    return pairs


def _parts(pairs: Sequence[Pair], size: int) -> list[list[Pair]]:
    """Split the pairs into parts of nearly equal length, each with at least `size` pairs.

    Fewer than `size` pairs form a single part.
    """
    count = max(1, len(pairs) // size)
    return [[pairs[i] for i in indices] for indices in np.array_split(np.arange(len(pairs)), count)]


class _Training(SupervisedTraining[Pair]):
    """The training of a reward model, with evaluations on held-out pairs."""

    loss, loss_metric = PreferenceLoss(), "reward_model/loss"
    shown_every, tokens_key = 10, "trained_tokens"

    def __init__(self, run: Run, training: Sequence[Pair], held_out: Sequence[Pair]):
        super().__init__(run, training)
        self._held_out = held_out

    def streams(self, records: list[Pair]) -> list[list[PairBatch]]:
        plan, make = self._divided(records)
        return plan.divided(make)

    def _divided(self, pairs: list[Pair]) -> tuple[Schedule, Callable[[Sequence[int]], PairBatch]]:
        """Divide the pairs into micro-batches, for one pass of the model over all pairs.

        Returns (schedule, make). The schedule has the indices of the sequences in each micro-batch. Pair i
        has the sequences 2i and 2i + 1. make(indices) returns the micro-batch with these sequences.
        """
        lengths = np.array([one.num_tokens for pair in pairs for one in (pair.chosen, pair.rejected)])
        plan = partition(self.config, lengths, self.run.trainer.cost_model, pairs=True)
        return plan, lambda part: PairBatch.of_pairs([pairs[i // 2] for i in part[::2]], 1 / len(pairs))

    def evaluate(self, step: int) -> dict[str, float]:
        """Score the held-out pairs, and return {"eval/NAME": value}, such as the loss and the accuracy.

        The result is empty if there are no held-out pairs. Each pass of the model scores about as many pairs
        as a training batch has.
        """
        if not self._held_out:
            return {}
        config, trainer, scores, margins = self.config, self.run.trainer, [], []
        with self.run.monitor.phases("evaluate"):
            for pairs in _parts(self._held_out, config.data.train_batch_size):
                found = trainer.scores(*self._divided(enough(pairs, config)))
                scores.append(found[: 2 * len(pairs)])
                margins += [pair.margin for pair in pairs]
        margin = torch.tensor(margins, dtype=torch.float32)
        inputs = PairInputs(torch.full_like(margin, 1 / len(margin)), margin)
        _, metrics = self.loss(torch.from_numpy(np.concatenate(scores)), inputs)
        return {
            f"eval/{name.removeprefix('reward_model/')}": value for name, value in to_floats(metrics).items()
        }
