"""`grpo-megatron reward-model`: trains a reward model on pairs of a preferred and a rejected response.

It uses the trainer of `train`, with a scalar head on the model and a loss on pairs.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from grpo_megatron.algorithm.preferences import PairInputs, PreferenceLoss
from grpo_megatron.commands.assemble import Run, Site, assemble, open_site, persist
from grpo_megatron.config.schema import Config
from grpo_megatron.data import EpochOrder, PromptTokenizer
from grpo_megatron.data.conversations import Conversations, pad_token
from grpo_megatron.data.preferences import Pair, load_pairs, pair_batch
from grpo_megatron.metrics import to_floats
from grpo_megatron.monitoring.terminal import say
from grpo_megatron.preflight.check import check_start
from grpo_megatron.run.guard import Guard
from grpo_megatron.run.resume import Checkpoint, finished_result
from grpo_megatron.run.stop import StopRequest
from grpo_megatron.trainer.mini_batch import enough, partition

# Number of steps between two lines on the terminal.
_SHOWN_EVERY = 10


def reward_model(config: Config, guard: Guard | None = None) -> dict[str, Any]:
    """Train a reward model on the pairs of data.train, export it, and return the result.

    guard: receives requests to stop; None: one that never ends the run.

    If an earlier start of this command has finished the run, its result is returned. Raises Stopped if the
    run was asked to stop.
    """
    if result := finished_result(config, "reward-model", say):
        return result
    check_start(config, "reward-model")
    conversations = Conversations(
        PromptTokenizer(config.model.path, config.data), pad_token(config.model.path)
    )
    training = _load("data.train", config.data.train, conversations, config)
    held_out = _load("data.eval", config.data.eval, conversations, config) if config.data.eval else []

    def attempt(site: Site, checkpoint: Checkpoint | None) -> dict[str, Any]:
        with assemble(site, checkpoint) as run:
            return run.finish(_Training(run, training, held_out).run(site.guard.stop))

    order = EpochOrder.of(training, config.run.seed, config.data.shuffle)
    with open_site(config, "reward-model", guard, lambda state: order.must_fit(state["order"])) as site:
        return persist(site, attempt)


def _load(key: str, sources: Any, conversations: Conversations, config: Config) -> Sequence[Pair]:
    pairs, counts = load_pairs(sources, conversations, config.data, config.rollout.max_response_length)
    left_out = "".join(f", {count} left out {why}" for why, count in counts.items() if count)
    say(f"{key}: {len(pairs)} pairs{left_out}")
    return pairs


def _parts(pairs: Sequence[Pair], size: int) -> list[list[Pair]]:
    """Split the pairs into parts of `size` or somewhat more, all nearly equal, without a small last part.

    If there are fewer than `size` pairs, they are one part.
    """
    count = max(1, len(pairs) // size)
    return [[pairs[i] for i in numbers] for numbers in np.array_split(np.arange(len(pairs)), count)]


class _Training:
    """The training loop of a reward model, for one attempt. It continues from the checkpoint of `run`."""

    def __init__(self, run: Run, training: Sequence[Pair], held_out: Sequence[Pair]):
        config = run.config
        self._run, self._config, self._pairs, self._held_out = run, config, training, held_out
        self._order = EpochOrder.of(training, config.run.seed, config.data.shuffle)
        self._tokens, self._evaluations, self._loss = 0, {}, None
        if run.state:
            self._order.load_state_dict(run.state["order"])
            self._tokens, self._evaluations = run.state["trained_tokens"], run.state["evaluations"]
            self._loss = run.state.get("loss")  # missing in checkpoints of earlier versions

    def run(self, stop: StopRequest) -> dict[str, Any]:
        """Train until step run.total_steps, with evaluations, log lines and checkpoints.

        Returns a dict with the last step, the last loss, the number of tokens of all steps, and the
        evaluations "before" and "after" training.
        """
        run, every, last = self._run, self._config.eval.every, self._config.run.total_steps
        if "before" not in self._evaluations:
            self._evaluations["before"] = self._evaluate(run.resumed)
        for step in range(run.resumed + 1, last + 1):
            stop.step = step
            self._step(step, shown=step in (1, last) or step % _SHOWN_EVERY == 0)
            # A request to stop may leave no time for an evaluation. The last one is always made: it belongs
            # to the result, and would not be made later.
            if step == last or (every and step % every == 0 and not stop.is_made):
                self._evaluations["after"] = self._evaluate(step)
            state = partial(self._state, step)
            if stop.is_made:
                stop.leave(run.saver, state)
            with run.monitor.phases("checkpoint"):
                run.saver.after_step(state() if run.saver.is_due(step, last=step == last) else None)
        result = {"step": max(run.resumed, last), "loss": self._loss, "tokens": self._tokens}
        return result | self._evaluations

    def _step(self, step: int, shown: bool) -> None:
        run, config = self._run, self._config
        run.monitor.start_step(step)
        with run.monitor.phases("prepare"):
            batch = pair_batch([self._pairs[i] for i in self._order.take(config.data.train_batch_size)])
            plan = partition(config, batch.lengths, run.trainer.cost_model, pairs=True)
        with run.monitor.phases("train"):
            metrics = to_floats(run.trainer.train_step(batch, plan, PreferenceLoss(), key=(step, 0)))
        self._tokens += batch.num_tokens
        self._loss = metrics["reward_model/loss"]
        scalars = run.monitor.finish_step(step, metrics, [batch])
        if shown:
            run.monitor.line(step, scalars)

    def _evaluate(self, step: int) -> dict[str, float]:
        """Score the held-out pairs, and return loss and accuracy on them; empty if there are none.

        The pairs are scored in parts of about the size of a training batch. step: for the log.
        """
        if not self._held_out:
            return {}
        config, trainer, scores, margins = self._config, self._run.trainer, [], []
        with self._run.monitor.phases("evaluate"):
            for pairs in _parts(self._held_out, config.data.train_batch_size):
                batch = pair_batch(enough(pairs, config))
                found = trainer.scores(
                    batch, partition(config, batch.lengths, trainer.cost_model, pairs=True)
                )
                scores.append(found[: 2 * len(pairs)])
                margins.append((batch.reward[0::2] - batch.reward[1::2])[: len(pairs)])
        margin = torch.from_numpy(np.concatenate(margins))
        inputs = PairInputs(torch.full_like(margin, 1 / len(margin)), margin)
        _, metrics = PreferenceLoss()(torch.from_numpy(np.concatenate(scores)), inputs)
        scalars = {
            f"eval/{name.removeprefix('reward_model/')}": value for name, value in to_floats(metrics).items()
        }
        self._run.monitor.evaluated(step, scalars)
        return scalars

    def _state(self, step: int) -> dict[str, Any]:
        return {
            "step": step,
            "order": self._order.state_dict(),
            "trained_tokens": self._tokens,
            "evaluations": self._evaluations,
            "loss": self._loss,
        }
