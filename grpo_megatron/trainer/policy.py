"""PolicyTrainer: passes over batches, on the ranks of all data-parallel replicas."""

from collections.abc import Iterator
from contextlib import contextmanager
from math import isfinite

import numpy as np
import ray
import torch

from grpo_megatron.algorithm.losses import TokenLoss
from grpo_megatron.algorithm.preferences import PreferenceLoss
from grpo_megatron.batch.schedule import Schedule
from grpo_megatron.batch.train_batch import TrainBatch
from grpo_megatron.cluster.hang_detector import HangDetector
from grpo_megatron.cluster.placement import Cluster
from grpo_megatron.config.command import Command
from grpo_megatron.config.schema import Config
from grpo_megatron.metrics import Max, Mean, Metrics, Sum, merge
from grpo_megatron.model.families import read_architecture
from grpo_megatron.model.parallel_sizes import ParallelSizes
from grpo_megatron.trainer.checkpoints import TrainerCheckpoints
from grpo_megatron.trainer.dropped_steps import DroppedSteps
from grpo_megatron.trainer.ranks import RankGroup
from grpo_megatron.trainer.weights import TrainerWeights


def _in_order(batch: TrainBatch, plan: Schedule, parts: list[np.ndarray]) -> np.ndarray:
    """Join the results of all data-parallel replicas, in the order of the batch's tokens.

    parts: one array [..., t] per replica, with one value per token of this replica's micro-batches.
    Returns float32 [..., T], with T = batch.num_tokens.
    """
    out = np.empty((*parts[0].shape[:-1], batch.num_tokens), dtype=np.float32)
    for dp, part in enumerate(parts):
        out[..., batch.token_index(plan.sequences(dp))] = part
    return out


class PolicyTrainer:
    """The trainer as the driver sees it: passes over batches that are spread over all data-parallel replicas.

    A pass returns when all ranks are done. It raises if a rank failed.

    ranks: the processes; puts them to sleep and wakes them
    weights: the trained weights, for weight sync and export
    checkpoints: saving and loading of the training state
    """

    def __init__(
        self,
        cluster: Cluster,
        config: Config,
        command: Command,
        log_dir: str,
        hang_detector: HangDetector,
        takes_turns: bool = False,
    ):
        """Start one process per rank and wait until all have built their model.

        command: decides what the ranks build from the configuration, see megatron.actor.Actor.
        log_dir: folder of the ranks' log files.
        hang_detector: hang detector, which observes all ranks.
        takes_turns: True: rollout engines use the ranks' GPUs while the ranks sleep. A call to sleeping ranks
            then raises RuntimeError. Otherwise it wakes them.
        """
        self.sizes = ParallelSizes.from_config(config.megatron)
        self.nodes = tuple(slot.node for slot in cluster.rank_slots)
        self.cost_model = read_architecture(
            config.model.path, reward_model=command == Command.reward_model
        ).cost_model
        self._dropped_steps = DroppedSteps(config.optimizer)
        self.ranks = RankGroup(cluster, config, command, log_dir, hang_detector, takes_turns)
        self.weights = TrainerWeights(self.ranks)
        self.checkpoints = TrainerCheckpoints(self.ranks, self.weights)

    def _split(self, batch: TrainBatch, plan: Schedule) -> list:
        """Put each replica's micro-batches into Ray's object store. Return one reference per replica."""
        return [ray.put([batch.select(mb) for mb in plan.micro_batches[dp]]) for dp in range(self.sizes.dp)]

    @contextmanager
    def reference(self) -> Iterator[None]:
        """Exchange the policy's weights for those of the reference model within the context.

        Only `logprobs(reference=True)` may be called inside. Entering and leaving copy all weights, so open
        one context for all mini-batches of a step.
        """
        self.ranks.call_alike("passes.begin_reference")
        yield
        # Not after an error: the ranks may hang in a collective.
        self.ranks.call_alike("passes.end_reference")

    def logprobs(
        self,
        batch: TrainBatch,
        plan: Schedule,
        reference: bool = False,
        key: tuple[int, int] | None = None,
        keep_hidden: bool = False,
    ) -> np.ndarray:
        """Return the log-prob of every target token, float32 [T], in the order of the batch.

        reference: use the reference model's weights, not the policy's. Only within the context `reference()`.
        key: MiniBatch.key. With it, ranks reuse prepared inputs in later passes over the same mini-batch.
        keep_hidden: with `reference`, keep the reference's last hidden states on the ranks. The training pass
            computes the exact KL from them.
        """
        arguments = [
            (micro_batches, reference, key, keep_hidden) for micro_batches in self._split(batch, plan)
        ]
        return self._checked(_in_order(batch, plan, self.ranks.call("passes.logprobs", arguments)))

    def scores(self, batch: TrainBatch, plan: Schedule) -> np.ndarray:
        """Return the reward model's score of every sequence, float32 [S].

        When a reward model is trained, it computes the scores. When a policy is trained, the frozen reward
        model on the same ranks does.
        """
        arguments = [(micro_batches,) for micro_batches in self._split(batch, plan)]
        parts = self.ranks.call("passes.scores", arguments)
        out = np.empty(batch.num_sequences, dtype=np.float32)
        for dp, part in enumerate(parts):
            out[plan.sequences(dp)] = part
        return self._checked(out)

    def probe(
        self, batch: TrainBatch, plan: Schedule, temperature: float, rounding: torch.dtype | None = None
    ) -> np.ndarray:
        """Return log-prob and entropy of every target, float32 [2, T], to compare trainer and engines.

        temperature: divides the logits, in place of the configured temperature.
        rounding: add rounding errors of this dtype after every layer, to measure their effect. None: add
            none.
        """
        arguments = [(micro_batches, temperature, rounding) for micro_batches in self._split(batch, plan)]
        return self._checked(_in_order(batch, plan, self.ranks.call("passes.probe", arguments)))

    def _checked(self, values: np.ndarray) -> np.ndarray:
        """Return the values. If they contain NaN, check the weights: UserError if these are not finite."""
        if np.isnan(values).any():
            self.weights.must_be_finite()
        return values

    def train_step(
        self,
        batch: TrainBatch,
        plan: Schedule,
        loss: TokenLoss | PreferenceLoss,
        current_is_old: bool = False,
        key: tuple[int, int] | None = None,
    ) -> Metrics:
        """Take one optimizer step on a mini-batch. Return its metrics.

        batch: its `weight` (of each token's loss) must be set. If all weights are 0, the step is dropped.
        current_is_old: the current policy is the one that generated the samples, so the loss takes the
            current log-probs, detached, as the old ones.
        key: MiniBatch.key.
        Raises UserError if optimizer.max_dropped_steps steps in a row were dropped. Raises UserError also if
        the gradient norm or the loss is not finite and the weights are not finite either.
        """
        parts = self._split(batch, plan)
        # If no token has a weight, drop the step: Adam would move the weights without a gradient too.
        untrained = () if batch.weight.any() else ("no token has a weight in the loss",)
        results = self.ranks.call(
            "passes.train_step",
            [(mb, loss, batch.num_tokens, current_is_old, key, bool(untrained)) for mb in parts],
        )
        metrics = merge([result.metrics for result in results])
        # This is a sum over micro-batches and ranks, but not over optimizer steps.
        metrics["actor/loss"] = Mean(metrics["actor/loss"].value, 1)
        first = results[0]
        step = key[0] if key else None
        if not (isfinite(first.grad_norm) and isfinite(metrics["actor/loss"].result())):
            self.weights.must_be_finite()
        self.weights.last_step = self.weights.last_step if first.dropped else step
        self._dropped_steps.note(
            first.dropped, first.grad_norm, metrics["actor/loss"].result(), step, first.beyond or untrained
        )
        if loss.limits:
            metrics["actor/steps_beyond_limit"] = Sum(float(bool(first.beyond)))
        metrics["actor/grad_norm"] = Mean(first.grad_norm, 1)
        metrics["actor/lr"] = Mean(first.lr, 1)
        metrics["actor/dropped_steps"] = Sum(float(first.dropped))
        metrics["actor/optimizer_steps"] = Sum(1.0)
        metrics["memory/rank_gib"] = Max(max(result.occupied for result in results) / 2**30)
        return metrics

    def reset_reference(self) -> None:
        """Make the policy's current weights the reference model's weights."""
        self.ranks.call_alike("weights.reset_reference")

    def state_dict(self) -> dict:
        """Return the part of a checkpoint's state that the driver holds, not the ranks: the dropped steps."""
        return {"dropped_steps": self._dropped_steps.state_dict()}

    def load_state_dict(self, state: dict) -> None:
        self._dropped_steps.load_state_dict(state["dropped_steps"])

    def close(self) -> None:
        self.ranks.close()
