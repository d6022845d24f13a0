"""The GRPO training loop: sample and score groups, compute advantages, train, sync the weights, log."""

import logging

import numpy as np

from grpo_megatron.algorithm.algorithm import Algorithm
from grpo_megatron.algorithm.filters import apply_filters
from grpo_megatron.algorithm.mismatch import with_tokens
from grpo_megatron.batch.arrays import reading_forbidden
from grpo_megatron.batch.sample import Group
from grpo_megatron.config.schema import Config, OldLogprobs
from grpo_megatron.errors import UserError
from grpo_megatron.files import float_or_nan
from grpo_megatron.metrics import Metrics, merge, nan_max, to_floats
from grpo_megatron.monitoring.monitor import Monitor
from grpo_megatron.monitoring.samples import TrainedOn
from grpo_megatron.rewards.shaping import shape_rewards
from grpo_megatron.rollout.pipeline import RolloutPipeline
from grpo_megatron.rollout.shown_trajectories import (
    TracedSequence,
    TreePainter,
    chosen_trajectories,
    within_limit,
)
from grpo_megatron.rollout.source import ReplayedRollouts
from grpo_megatron.rollout.statistics import step_statistics
from grpo_megatron.run.loop import StepLoop
from grpo_megatron.samples.ledger import Ledger
from grpo_megatron.trainer.mini_batch import MiniBatch, make_mini_batches
from grpo_megatron.trainer.policy import PolicyTrainer

logger = logging.getLogger(__name__)

# Beginnings of the names of metrics that compare the log-probs of engine and trainer.
_MISMATCH = ("mismatch/", "staleness/")


class Controller:
    """The GRPO training loop. It decides the order of the work. The following objects do the work.

    rollouts: samples the groups of a step with the engines, or reads them from a recording
    trainer: computes log-probs and makes the optimizer steps on the trainer ranks
    algorithm: computes advantages and token weights, and chooses the loss
    monitor: receives metrics, timings and texts, and passes them to logs and terminal
    loop: counts the steps, and evaluates, saves and stops between them
    ledger: records what becomes of each sample, and checks that each ends exactly once
    """

    def __init__(
        self,
        config: Config,
        rollouts: RolloutPipeline | ReplayedRollouts,
        trainer: PolicyTrainer,
        algorithm: Algorithm,
        monitor: Monitor,
        loop: StepLoop,
        ledger: Ledger,
    ):
        """Create a training loop for a new run. To continue a run, call `load_state_dict` afterwards."""
        self.config = config
        self.rollouts, self.trainer, self.algorithm = rollouts, trainer, algorithm
        self.monitor, self.loop, self.ledger = monitor, loop, ledger
        self.totals = {"seconds": 0.0, "mismatch_max": 0.0}

    def run(self) -> dict:
        """Sync the weights to the engines, train until step run.total_steps, and return the results.

        Evaluations and checkpoints are made when they are due. Raises Stopped if asked to stop early.

        The result is a dict with the following keys. Steps before a resume are included in all of them.
        "step": last step that was trained.
        "before", "after": scores {name: value} of the evaluations before and after training.
        "tokens": number of tokens, prompt and response, of the sequences that all steps have trained on.
        "seconds": duration of all steps.
        "mismatch_max": largest difference between the log-probs of engine and trainer, over all tokens that
            were sampled with the newest weights; 0.0 if there were no such tokens.
        """
        self.rollouts.start()
        with reading_forbidden():
            self.loop.run(self)
        return {"step": self.loop.step, **self.loop.evaluations, "tokens": self.ledger.tokens, **self.totals}

    def train_step(self, step: int) -> list[MiniBatch]:
        """Make one step of GRPO: sample and score groups, train on them, and sync the weights to the engines.

        The results are passed to the monitor. If all optimizer steps were dropped, the weights have not
        changed, and no sync takes place.

        step: index of the step, from 1, as `loop.begin_step` returns it.

        Returns the step's mini-batches. Pass one to `trainer.read` to get the log-probs and advantages of its
        tokens.

        Raises UserError if a sample does not end exactly once in the ledger (the record of what becomes of
        each sample). Also raises UserError if log-probs of engine and trainer differ by more than
        mismatch.threshold and mismatch.action is `stop`.
        """
        config, phases = self.config, self.monitor.phases
        rollout = self.rollouts.take(step)
        with phases("prepare"):
            self.ledger.taken(step, rollout.groups, rollout.left_out)
            filtered = apply_filters(shape_rewards(rollout.groups, config, step), config.algorithm)
            self.ledger.filtered(step, filtered.removed)
            groups = filtered.groups
            sampled = step_statistics(groups, rollout, config.eval.pass_reward, self.rollouts.version)
            version = self.rollouts.version if sampled.get("staleness/max") else None
            mini_batches = make_mini_batches(groups, config, self.trainer.cost_model, step, version)
            tables = [mini.table for mini in mini_batches]
        with phases("logprobs"):
            sums, mismatch = self.trainer.measure(mini_batches)
        with phases("prepare"):
            mismatch = self.checked_mismatch(step, mismatch)
            coefficients, measured = self.algorithm.coefficients(tables, sums)
        trained = self.trainer.train(step, mini_batches, coefficients, self.algorithm.loss, phases)
        if not mismatch:
            # Only the first optimizer step sees the weights the engine sampled with.
            mismatch = {name: value for name, value in trained[0].items() if name.startswith(_MISMATCH)}
            mismatch = self.checked_mismatch(step, mismatch)
        self.show_trajectories(step, groups, mini_batches, mismatch)
        metrics = merge(trained)
        self.algorithm.note_trained(metrics)
        dropped = [own["actor/dropped_steps"].result() > 0 for own in trained]
        self.ledger.trained(step, tables, [own.weights.weight for own in coefficients], dropped)
        self.ledger.balance()
        if not all(dropped):
            self.rollouts.weights_changed()
        metrics = {name: value for name, value in metrics.items() if not name.startswith(_MISMATCH)}
        advantages = [own.credit.of_sequences(of) for own, of in zip(coefficients, sums, strict=True)]
        lengths = [table.num_tokens for table in tables]
        trained_on = TrainedOn(
            np.concatenate(lengths), config.train.ppo_epochs, groups, np.concatenate(advantages)
        )
        self.report(step, trained_on, {**metrics, **mismatch, **measured}, sampled)
        return mini_batches

    def checked_mismatch(self, step: int, mismatch: Metrics) -> Metrics:
        """Check the mismatch (difference between the log-probs of engine and trainer) against its limit.

        The tokens with the largest mismatch are logged. If a mismatch exceeds the limit, mismatch.action
        decides whether a warning is shown or UserError is raised.

        Only tokens that were sampled with the newest weights are checked and logged, because training alone
        makes the log-probs of other tokens differ. If there are no such tokens, nothing is checked or logged.

        mismatch: metrics of the step's mismatch; empty if it was not measured.

        Returns `mismatch` without the metrics to which no token contributed.
        """
        mismatch = with_tokens(mismatch)
        if "mismatch/max" not in mismatch:
            return mismatch
        report = self.algorithm.mismatch_report(mismatch)
        self.monitor.text(step, "mismatch/worst", report.worst)
        if report.stop:
            raise UserError(f"step {step}: {report.text}")
        if report.text:
            logger.warning(f"step {step}: {report.text}")
        return mismatch

    def show_trajectories(
        self, step: int, groups: list[Group], mini_batches: list[MiniBatch], mismatch: Metrics
    ) -> None:
        """Pass some trajectories of a step to the monitor, with their tokens as trees, if they are due.

        Only their tokens and log-probs are fetched, with one call to the ranks.

        groups: the groups that the step has trained on.
        mini_batches: the mini-batches of these groups.
        mismatch: metrics of the step's mismatch; empty if it was not measured.
        """
        if not self.monitor.shows_samples(step):
            return
        worst = mismatch["mismatch/worst"].result() if "mismatch/worst" in mismatch else []
        reasons = chosen_trajectories(groups, worst)
        with self.monitor.phases("show"):
            traced = self._traced(mini_batches, set(reasons))
        painter = TreePainter(
            self.algorithm.decode,
            self.config.monitor.sample_characters,
            self.rollouts.version,
            worst,
            self.ledger.sample_of,
        )
        self.monitor.trajectories(step, lambda: painter.trajectories(groups, traced, reasons))

    def _traced(self, mini_batches: list[MiniBatch], wanted: set[int]) -> list[TracedSequence]:
        """Return the sequences of some trajectories with their tokens, which the ranks keep.

        wanted: ids of the trajectories. Sequences beyond `within_limit` are left out.
        """
        chosen = [(mini, _sequences_of(mini, wanted)) for mini in mini_batches]
        chosen = [(mini, indices) for mini, indices in chosen if indices]
        read = self.trainer.read_sequences(chosen, "tokens", "loss_mask", "rollout_logp", "old_logp")
        is_known = self.config.train.old_logprobs == OldLogprobs.recompute
        return [
            TracedSequence.of_columns(mini.samples[index], *arrays, is_known=is_known)
            for (mini, indices), own in zip(chosen, read, strict=True)
            for index, arrays in zip(indices, own, strict=True)
        ]

    def evaluate(self, step: int) -> dict[str, float]:
        """Evaluate on the held-out prompts, and return {name: score}.

        The result is empty if the run has no held-out prompts. It is also empty with eval.beside: the
        evaluation then goes on during the next steps, and the monitor gets the scores when it has ended.

        step: last step that was trained. The samples are logged under this step.
        """
        return self.rollouts.evaluate(step)

    def report(self, step: int, trained_on: TrainedOn, metrics: Metrics, sampled: dict[str, float]) -> None:
        """Pass the results of a step to the monitor. Update the run's total time and largest mismatch.

        trained_on: the sequences that the step trained on.
        metrics: metrics of the training.
        sampled: scalars about the step's samples.
        """
        scalars = to_floats(metrics) | sampled | self.rollouts.metrics
        scalars = self.monitor.finish_step(step, scalars, trained_on)
        self.monitor.line(step, scalars)
        self.totals["seconds"] += scalars["time/step"]
        if "mismatch/max" in scalars:
            self.totals["mismatch_max"] = nan_max(self.totals["mismatch_max"], scalars["mismatch/max"])

    def state_dict(self) -> dict:
        return {
            "ledger": self.ledger.state_dict(),
            "totals": self.totals,
            **self.rollouts.state_dict(),
            "algorithm": self.algorithm.state_dict(),
            "trainer": self.trainer.state_dict(),
        }

    def load_state_dict(self, state: dict) -> None:
        """Restore the totals, and the states of rollouts, algorithm and trainer, from a checkpoint.

        `loop` and `ledger` are not restored here: the caller must restore the loop, and must have created the
        ledger from state["step"] and state["ledger"].

        state: the driver's state, read from the checkpoint's state.json.
        """
        self.totals = {name: float_or_nan(value) for name, value in state["totals"].items()}
        self.rollouts.load_state_dict(state)
        self.algorithm.load_state_dict(state["algorithm"])
        self.trainer.load_state_dict(state["trainer"])


def _sequences_of(mini: MiniBatch, wanted: set[int]) -> list[int]:
    """Return the indices of the sequences of some trajectories, as far as they are within the limit."""
    indices: dict[int, list[int]] = {}
    for index in np.flatnonzero(np.isin(mini.table.trajectory_id, list(wanted))).tolist():
        indices.setdefault(mini.samples[index].trajectory_id, []).append(index)
    return [
        index for own in indices.values() for index in own[: within_limit([mini.samples[i] for i in own])]
    ]
