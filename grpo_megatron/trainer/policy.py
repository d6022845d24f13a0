"""PolicyTrainer: runs passes over batches (log-probs, scores, training) on all trainer ranks."""

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
    """Merge per-token results of the data-parallel replicas: float32 [..., T], in the order of the batch.

    plan: the sequences that each replica computed.
    parts: one array [..., t] per replica, with a value for each token of the replica's micro-batches.
    """
    out = np.empty((*parts[0].shape[:-1], batch.num_tokens), dtype=np.float32)
    for dp, part in enumerate(parts):
        out[..., batch.token_index(plan.sequences(dp))] = part
    return out


class PolicyTrainer:
    """The driver's handle on the trainer: computes log-probs and scores, and takes optimizer steps.

    Each of these passes divides a batch among the data-parallel replicas, and returns when all ranks are
    done. A pass raises an exception if a rank failed.

    ranks: the processes of all ranks, with methods to put the ranks to sleep and to wake them
    weights: the trained weights, for weight sync and export
    checkpoints: saving and loading of the training state
    sizes: the parallel sizes
    nodes: the node of each rank
    cost_model: estimates the compute cost of a sequence, for `mini_batch.partition`
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

        command: the grpo-megatron command that runs. It decides what the ranks build: a policy, or a reward
            model (see megatron.actor.Actor).
        log_dir: folder of the ranks' log files.
        hang_detector: observes the heartbeats of all ranks.
        takes_turns: True if rollout engines use the ranks' GPUs while the ranks sleep. In this case, a pass
            raises RuntimeError if the ranks sleep. If False, a pass wakes sleeping ranks.
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
        """Put the micro-batches of each data-parallel replica into Ray's object store.

        Returns one ObjectRef per replica, in the order of the replicas. Each refers to the replica's
        list[TrainBatch], with one TrainBatch per micro-batch.
        """
        return [ray.put([batch.select(mb) for mb in plan.micro_batches[dp]]) for dp in range(self.sizes.dp)]

    @contextmanager
    def reference(self) -> Iterator[None]:
        """Replace the policy's weights in the model by the reference weights, inside the `with` block.

        Only `logprobs(reference=True)` may be called inside the block. All weights are copied at the start
        and at the end of the block, so use one block for all mini-batches of a step.
        """
        self.ranks.call_alike("passes.begin_reference")
        yield
        # After an error, do not swap back: the ranks may hang in a collective.
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

        batch: T tokens.
        plan: division of the batch among data-parallel replicas and micro-batches.
        reference: if True, use the reference model's weights. Call this inside a `with reference()` block.
        key: MiniBatch.key. Ranks reuse prepared inputs in later passes over a mini-batch with the same key.
        keep_hidden: with reference=True, keep the last hidden states on the ranks. The training pass computes
            the exact KL to the reference from these states.
        """
        arguments = [
            (micro_batches, reference, key, keep_hidden) for micro_batches in self._split(batch, plan)
        ]
        return self._checked(_in_order(batch, plan, self.ranks.call("passes.logprobs", arguments)))

    def scores(self, batch: TrainBatch, plan: Schedule) -> np.ndarray:
        """Return the reward model's score of every sequence, float32 [S], in the order of the batch.

        If the ranks train a policy, a frozen reward model on the same ranks computes the scores. If the ranks
        train a reward model, this model computes them.

        plan: division of the batch among data-parallel replicas and micro-batches.
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
        """Return log-prob and entropy of every target token, float32 [2, T], to compare with an engine's.

        The values are in the order of the batch's T tokens.

        plan: division of the batch among data-parallel replicas and micro-batches.
        temperature: divides the logits, instead of the configured temperature.
        rounding: dtype whose rounding errors are simulated by random changes of every layer's output, to
            measure the effect of rounding. None: nothing is simulated.
        """
        arguments = [(micro_batches, temperature, rounding) for micro_batches in self._split(batch, plan)]
        return self._checked(_in_order(batch, plan, self.ranks.call("passes.probe", arguments)))

    def _checked(self, values: np.ndarray) -> np.ndarray:
        """Return `values` unchanged. Raise UserError if a value is NaN because a weight is not finite."""
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
        """Take one optimizer step on a mini-batch. Return the metrics of the step.

        batch: samples of the mini-batch. `batch.weight` has the weight of each token's loss. If all weights
            are 0, the step is dropped.
        plan: division of the batch among data-parallel replicas and micro-batches.
        current_is_old: True if the current policy generated the samples. The loss then uses the current
            log-probs, detached, as the old log-probs.
        key: MiniBatch.key. Ranks reuse inputs that an earlier pass prepared under the same key.
        Raises UserError if optimizer.max_dropped_steps steps in a row were dropped, or if gradient norm or
        loss are not finite and a weight is not finite either.
        """
        parts = self._split(batch, plan)
        # If no token has a weight, drop the step: Adam's momentum would change the weights even so.
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
        """Copy the policy's current weights into the reference weights."""
        self.ranks.call_alike("weights.reset_reference")

    def state_dict(self) -> dict:
        """Return the state of the trainer that the driver process saves in checkpoints.

        The state is {"dropped_steps": state of the counter of optimizer steps that were dropped in a row}.
        Weights and optimizer state are not included, because the ranks save them.
        """
        return {"dropped_steps": self._dropped_steps.state_dict()}

    def load_state_dict(self, state: dict) -> None:
        self._dropped_steps.load_state_dict(state["dropped_steps"])

    def close(self) -> None:
        self.ranks.close()
