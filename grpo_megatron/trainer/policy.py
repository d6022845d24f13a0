"""PolicyTrainer: runs passes over batches (log-probs, scores, training) on all trainer ranks."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch

from grpo_megatron.algorithm.coefficients import SequenceCoefficients
from grpo_megatron.algorithm.losses import CrossEntropyLoss, PolicyLoss, TokenLoss
from grpo_megatron.algorithm.preferences import PreferenceLoss
from grpo_megatron.batch.arrays import Handle
from grpo_megatron.batch.examples import ExampleBatch
from grpo_megatron.batch.pairs import PairBatch
from grpo_megatron.batch.schedule import Schedule
from grpo_megatron.batch.sums import SequenceSums
from grpo_megatron.batch.table import chosen_rows, concatenated
from grpo_megatron.batch.token_stream import TokenStream
from grpo_megatron.cluster.hang_detector import HangDetector
from grpo_megatron.cluster.placement import Cluster
from grpo_megatron.config.command import Command
from grpo_megatron.config.schema import Config
from grpo_megatron.megatron.results import Measurement, TrainResult
from grpo_megatron.metrics import Max, Mean, Metrics, Sum, merge
from grpo_megatron.model.families import read_architecture
from grpo_megatron.model.parallel_sizes import ParallelSizes
from grpo_megatron.monitoring.phases import Phases
from grpo_megatron.trainer.checkpoints import TrainerCheckpoints
from grpo_megatron.trainer.gradients import TrainerGradients
from grpo_megatron.trainer.mini_batch import Key, MiniBatch
from grpo_megatron.trainer.optimizer_steps import OptimizerSteps
from grpo_megatron.trainer.ranks import RankGroup
from grpo_megatron.trainer.weights import TrainerWeights

# Function that returns the token stream of a micro-batch, given the indices of its sequences in the batch.
MakeStream = Callable[[Sequence[int]], TokenStream]


def _sums(mini: MiniBatch, parts: list[Measurement]) -> SequenceSums:
    """Return the sums over each sequence's tokens, such as of the KL, in the order of `mini.samples`.

    parts: measurement of each data-parallel replica, in the order of the replicas.
    """
    return chosen_rows(concatenated([part.sums for part in parts]), mini.plan.order)


class PolicyTrainer:
    """The driver's handle on the trainer: computes log-probs and scores, and takes optimizer steps.

    A method that computes something divides its batch among the data-parallel replicas, and returns when all
    ranks are done. If a rank fails, the method raises an error (see cluster.processes.gather).

    ranks: the processes of all ranks, with methods to put the ranks to sleep and to wake them
    weights: the trained weights, for weight sync and export
    checkpoints: saving and loading of the training state
    gradients: adds up gradients over several calls, for a user's own loop
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
        takes_turns: True if rollout engines use the ranks' GPUs while the ranks sleep. Methods that need the
            ranks awake then raise RuntimeError if the ranks sleep. If False, these methods wake the ranks.
        """
        self.sizes = ParallelSizes.from_config(config.megatron)
        self.nodes = tuple(slot.node for slot in cluster.rank_slots)
        self.cost_model = read_architecture(
            config.model.path, reward_model=command == Command.reward_model
        ).cost_model
        self._epochs, self._reset_every = config.train.ppo_epochs, config.ref.reset_every
        self.ranks = RankGroup(cluster, config, command, log_dir, hang_detector, takes_turns)
        self.weights = TrainerWeights(self.ranks)
        self.checkpoints = TrainerCheckpoints(self.ranks, self.weights)
        self._steps = OptimizerSteps(config.optimizer, self.weights)
        self.gradients = TrainerGradients(self.ranks, self._steps)

    def measure(self, mini_batches: list[MiniBatch]) -> tuple[list[SequenceSums], Metrics]:
        """Send the mini-batches of a step to the ranks, which compute the log-probs before training.

        The ranks compute the log-probs of the old policy and of the reference, as far as the configuration
        needs them: train.old_logprobs says whether old log-probs are recomputed, and only a KL term needs the
        reference's. The ranks keep samples and log-probs until the next call of `measure`.

        Returns (sums, metrics): for each mini-batch the sums over the tokens of each of its sequences, and
        metrics of the mismatch between engine and trainer. There are no metrics unless
        train.old_logprobs=recompute, because otherwise only the training pass knows the mismatch.

        Raises UserError if a log-prob is NaN because a weight is not finite.
        """
        divided = {mini.key: mini.plan.divided(mini.for_ranks) for mini in mini_batches}
        version = mini_batches[0].version if mini_batches else None
        results = self.ranks.call(
            "mini_batches.measure",
            [({key: of[dp] for key, of in divided.items()}, version) for dp in range(self.sizes.dp)],
        )
        found = [measurement for result in results for measurement in result.values()]
        if any(measurement.has_nan for measurement in found):
            self.weights.must_be_finite()
        return (
            [_sums(mini, [result[mini.key] for result in results]) for mini in mini_batches],
            merge([measurement.metrics for measurement in found]),
        )

    def read(self, mini: MiniBatch, *names: str) -> list[np.ndarray]:
        """Return per-token arrays that the ranks keep of a mini-batch, for diagnosis.

        The result has an array [T, ...] for each name. Its T tokens are those of the mini-batch, in the order
        of the mini-batch's samples.

        mini: a mini-batch of the newest call of `measure`.
        names: columns of TrainBatch, such as "old_logp".
        """
        parts = self.ranks.call("mini_batches.read", [(mini.key, names)] * self.sizes.dp)
        lengths, plan = mini.table.num_tokens, mini.plan
        return [np.concatenate(plan.by_sequence([part[name] for part in parts], lengths)) for name in names]

    def read_sequences(
        self, wanted: Sequence[tuple[MiniBatch, Sequence[int]]], *names: str
    ) -> list[list[tuple[np.ndarray, ...]]]:
        """Return per-token arrays that the ranks keep of some sequences, with one call to the ranks.

        The result has, for each mini-batch and each of its wanted sequences, a tuple of arrays [n, ...] for
        the n tokens of the sequence.

        wanted: mini-batches of the newest call of `measure`, with indices of their samples.
        names: columns of TrainBatch, such as "tokens".
        """
        places = [mini.plan.places(indices) for mini, indices in wanted]
        rows: list[dict[Key, list[int]]] = [{} for _ in range(self.sizes.dp)]
        for (mini, _), own in zip(wanted, places, strict=True):
            for dp, row in own:
                rows[dp].setdefault(mini.key, []).append(row)
        parts = self.ranks.call("mini_batches.read_sequences", [(own, names) for own in rows])
        read = [{key: iter(arrays) for key, arrays in part.items()} for part in parts]
        return [
            [next(read[dp][mini.key]) for dp, _ in own] for (mini, _), own in zip(wanted, places, strict=True)
        ]

    def scores(self, plan: Schedule, make: MakeStream) -> np.ndarray:
        """Return the score of every sequence by the reward model that the ranks train, float32 [S].

        The scores are in the order of the sequences' indices.

        plan: division of the sequences among data-parallel replicas and micro-batches.
        make: function that returns the token stream of a micro-batch. Its argument is the indices of the
            micro-batch's sequences.

        Raises UserError if a score is NaN and a weight is not finite. Other NaNs are returned.
        """
        parts = self.ranks.call("passes.scores", [(own,) for own in plan.divided(make)])
        return self._checked(np.concatenate(parts)[plan.order])

    def score_stored(self, plan: Schedule, handles: Sequence[Handle]) -> np.ndarray:
        """Return the score of every sequence by the frozen reward model beside the policy, float32 [S].

        The scores are in the order of the handles.

        plan: division of the sequences among data-parallel replicas and micro-batches.
        handles: for each sequence, a handle of its token ids, which the ranks fetch.

        Raises UserError if a score is NaN and a weight of the policy is not finite. Other NaNs are returned.
        """
        divided = plan.divided(lambda part: [handles[i] for i in part])
        parts = self.ranks.call("passes.score_stored", [(own,) for own in divided])
        return self._checked(np.concatenate(parts)[plan.order])

    def probe(
        self,
        plan: Schedule,
        make: MakeStream,
        temperature: float,
        rounding: torch.dtype | None = None,
        reference: bool = False,
    ) -> list[np.ndarray]:
        """Return log-prob and entropy of every target token, to compare with an engine's.

        The result has an array float32 [n, 2] for each sequence of n tokens, in the order of the sequences.
        Row i has the log-prob of token i + 1, and the entropy of the distribution that predicts this token.
        The last row predicts no token and has no meaning.

        plan: division of the sequences among data-parallel replicas and micro-batches.
        make: function that returns the token stream of a micro-batch. Its argument is the indices of the
            micro-batch's sequences.
        temperature: divides the logits, instead of the configured temperature.
        rounding: dtype whose rounding errors are simulated by random changes of every layer's output, to
            measure the effect of rounding. None: nothing is simulated.
        reference: if True, the values are those of the reference model.

        Raises UserError if a value is NaN and a weight is not finite. Other NaNs are returned.
        """
        streams = plan.divided(make)
        parts = self.ranks.call("passes.probe", [(own, temperature, rounding, reference) for own in streams])
        lengths = np.concatenate([stream.lengths for own in streams for stream in own])[plan.order]
        return plan.by_sequence([self._checked(part.T) for part in parts], lengths)

    def _checked(self, values: np.ndarray) -> np.ndarray:
        """Return `values` unchanged. Raise UserError if a value is NaN and a weight is not finite."""
        if np.isnan(values).any():
            self.weights.must_be_finite()
        return values

    def train(
        self,
        step: int,
        mini_batches: list[MiniBatch],
        coefficients: list[SequenceCoefficients],
        loss: PolicyLoss,
        phases: Phases,
    ) -> list[Metrics]:
        """Train on the mini-batches: one optimizer step per mini-batch in each of train.ppo_epochs epochs.

        Afterwards the policy's weights are copied into the reference weights if `step` is a multiple of
        ref.reset_every.

        step: index of the training step.
        mini_batches: the mini-batches of the newest call of `measure`.
        coefficients: advantages and weights of each mini-batch's sequences.
        loss: the loss. Its limit on the mismatch applies only to the first optimizer step.
        phases: timer that measures the phases `train` and `reference`.

        Returns the metrics of each optimizer step, in order. Raises the errors of `train_mini_batch`.
        """
        trained: list[Metrics] = []
        with phases("train"):
            for mini, own in list(zip(mini_batches, coefficients, strict=True)) * self._epochs:
                trained.append(self.train_mini_batch(mini, own, loss))
                # From the second optimizer step on, policy and engine are expected to differ.
                loss = replace(loss, mismatch_limit=None)
        if self._reset_every and step % self._reset_every == 0:
            with phases("reference"):
                self.reset_reference()
        return trained

    def train_mini_batch(
        self, mini: MiniBatch, coefficients: SequenceCoefficients, loss: PolicyLoss
    ) -> Metrics:
        """Take one optimizer step on a mini-batch that `measure` has sent to the ranks. Return its metrics.

        coefficients: advantages and weights of the mini-batch's sequences. If no token has a weight, the step
            is dropped, so that no weight of the model changes.
        loss: the loss of the policy. The step is also dropped if a metric exceeds a limit in loss.limits.

        Raises UserError if optimizer.max_dropped_steps steps in a row were dropped, or if gradient norm or
        loss is not finite because a weight is not finite.
        """
        arguments = [
            (mini.key, coefficients.of(mini.plan.sequences(dp)), loss, int(mini.table.num_tokens.sum()))
            for dp in range(self.sizes.dp)
        ]
        results = self.ranks.call("mini_batches.train_step", arguments)
        return self._step_metrics(results, loss, mini.key[0], coefficients.trains)

    def train_step(
        self,
        streams: list[list[ExampleBatch]] | list[list[PairBatch]],
        loss: CrossEntropyLoss | PreferenceLoss,
        step: int,
    ) -> Metrics:
        """Take one optimizer step of supervised training. Return its metrics.

        streams: the micro-batches of each data-parallel replica. If the weights of all tokens in the loss are
            0, the step is dropped, so that no weight of the model changes.
        loss: CrossEntropyLoss for ExampleBatches, PreferenceLoss for PairBatches.
        step: index of the training step.

        Raises UserError if optimizer.max_dropped_steps steps in a row were dropped, or if gradient norm or
        loss is not finite because a weight is not finite.
        """
        every = [stream for own in streams for stream in own]
        trains = any(stream.weight.any() for stream in every)
        tokens = sum(stream.num_tokens for stream in every)
        results = self.ranks.call(
            "passes.train_step", [(own, loss, tokens, False, (step, 0), not trains) for own in streams]
        )
        return self._step_metrics(results, loss, step, trains)

    def _step_metrics(
        self, results: list[TrainResult], loss: TokenLoss | PreferenceLoss, step: int, trains: bool
    ) -> Metrics:
        """Return the metrics of an optimizer step, and record its outcome.

        results: result of each data-parallel replica.
        loss: the loss. If it has limits on metrics, a metric tells whether one was exceeded.
        step: index of the training step.
        trains: False if the optimizer step was dropped because no token has a weight in the loss. (With a
            gradient of zero, Adam would still move the weights.)

        Raises UserError if optimizer.max_dropped_steps steps in a row were dropped, or if gradient norm or
        loss is not finite because a weight is not finite.
        """
        untrained = () if trains else ("no token has a weight in the loss",)
        metrics = merge([result.metrics for result in results])
        # This is a sum over micro-batches and ranks, but not over optimizer steps.
        metrics["actor/loss"] = Mean(metrics["actor/loss"].value, 1)
        first = results[0]
        self._steps.note(first, metrics["actor/loss"].result(), step, first.beyond or untrained)
        if loss.limits:
            metrics["actor/steps_beyond_limit"] = Sum(float(bool(first.beyond)))
        metrics["actor/grad_norm"] = Mean(first.grad_norm, 1)
        metrics["actor/lr"] = Mean(first.lr, 1)
        metrics["actor/dropped_steps"] = Sum(float(first.dropped))
        metrics["actor/optimizer_steps"] = Sum(1.0)
        metrics["memory/rank_gib"] = Max(max(result.occupied for result in results) / 2**30)
        return metrics

    def reset_reference(self) -> None:
        """Copy the policy's current weights into the reference model, on all ranks."""
        self.ranks.call_alike("weights.reset_reference")

    def state_dict(self) -> dict:
        """Return the state of the trainer that the driver process saves in checkpoints.

        The state is {"dropped_steps": state of the counter of optimizer steps that were dropped in a row}.
        Weights and optimizer state are not included, because the ranks save them.
        """
        return {"dropped_steps": self._steps.state_dict()}

    def load_state_dict(self, state: dict) -> None:
        self._steps.load_state_dict(state["dropped_steps"])

    def close(self) -> None:
        self.ranks.close()
