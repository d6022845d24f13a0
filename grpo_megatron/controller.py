"""The GRPO training loop: sample groups, score, weigh, train, publish the weights, log."""

import logging

import numpy as np

from grpo_megatron.algorithm.algorithm import Algorithm
from grpo_megatron.algorithm.filters import apply_filters
from grpo_megatron.config.schema import Config
from grpo_megatron.errors import UserError
from grpo_megatron.files import float_or_nan
from grpo_megatron.metrics import Metrics, merge, nan_max, to_floats
from grpo_megatron.monitoring.monitor import Monitor
from grpo_megatron.monitoring.samples import TrainedOn
from grpo_megatron.rewards.shaping import shape_rewards
from grpo_megatron.rollout.source import ReplayedRollouts
from grpo_megatron.rollout.statistics import step_statistics
from grpo_megatron.rollout.synchronous import SynchronousRollouts
from grpo_megatron.run.loop import StepLoop
from grpo_megatron.samples.ledger import Ledger
from grpo_megatron.trainer.mini_batch import MiniBatch, make_mini_batches
from grpo_megatron.trainer.step import StepTrainer

logger = logging.getLogger(__name__)


class Controller:
    """The GRPO training loop. It decides what happens in which order; its collaborators do the work.

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
        rollouts: SynchronousRollouts | ReplayedRollouts,
        trainer: StepTrainer,
        algorithm: Algorithm,
        monitor: Monitor,
        loop: StepLoop,
        ledger: Ledger,
    ):
        """Connect the collaborators, for a run from step 0. `load_state_dict` continues from a checkpoint."""
        self.config = config
        self.rollouts, self.trainer, self.algorithm = rollouts, trainer, algorithm
        self.monitor, self.loop, self.ledger = monitor, loop, ledger
        self.totals = {"seconds": 0.0, "mismatch_max": 0.0}

    def run(self) -> dict:
        """Train until step run.total_steps.

        Returns a dict: "step" is the last step, "before" and "after" are the scores {name: value} of the
        evaluations before and after training, "tokens" is the number of tokens of all batches, "seconds" the
        duration of all steps, and "mismatch_max" the largest mismatch between engine and trainer. Raises
        Stopped after a step if the run was asked to stop.
        """
        self.rollouts.start()
        self.loop.run(self)
        return {"step": self.loop.step, **self.loop.evaluations, "tokens": self.ledger.tokens, **self.totals}

    def train_step(self, step: int) -> list[MiniBatch]:
        """Make one step of GRPO: sample and score groups, train on them, and publish the new weights.

        step: number of the step, as `loop.begin_step` returns it; the first step of a run is 1.

        Returns the step's mini-batches. `trainer.policy.read` reads their tokens' log-probs and advantages.
        Raises UserError if the books of the step's samples do not balance.
        """
        config, phases = self.config, self.monitor.phases
        rollout = self.rollouts.take(step)
        with phases("prepare"):
            self.ledger.taken(step, rollout.groups, rollout.left_out)
            filtered = apply_filters(shape_rewards(rollout.groups, config, step), config.algorithm)
            self.ledger.filtered(step, filtered.removed)
            groups = filtered.groups
            sampled = step_statistics(groups, rollout, config.eval.pass_reward, self.rollouts.version)
            mini_batches = make_mini_batches(groups, config, self.trainer.cost_model, step)
            tables = [mini.table for mini in mini_batches]
        sums, mismatch = self.trainer.measure(mini_batches)
        with phases("prepare"):
            self.act_on_mismatch(step, mismatch)
            coefficients, measured = self.algorithm.coefficients(tables, sums)
        trained = self.trainer.train(step, mini_batches, coefficients, self.algorithm.loss)
        if not mismatch:
            # Only the first optimizer step sees the weights the engine sampled with.
            mismatch = {name: value for name, value in trained[0].items() if name.startswith("mismatch/")}
            self.act_on_mismatch(step, mismatch)
        metrics = merge(trained)
        self.algorithm.note_trained(metrics)
        dropped = [own["actor/dropped_steps"].result() > 0 for own in trained]
        self.ledger.trained(step, tables, [own.weights.weight for own in coefficients], dropped)
        self.ledger.balance()
        if not all(dropped):
            self.rollouts.weights_changed()
        metrics = {name: value for name, value in metrics.items() if not name.startswith("mismatch/")}
        advantages = [own.credit.of_sequences(of) for own, of in zip(coefficients, sums, strict=True)]
        lengths = [table.num_tokens for table in tables]
        trained_on = TrainedOn(
            np.concatenate(lengths), config.train.ppo_epochs, groups, np.concatenate(advantages)
        )
        self.report(step, trained_on, {**metrics, **mismatch, **measured}, sampled)
        return mini_batches

    def act_on_mismatch(self, step: int, mismatch: Metrics) -> None:
        """Log the tokens whose log-probs differ most between engine and trainer, and apply mismatch.action.

        Depending on that setting, a mismatch beyond its limit shows a warning or raises UserError. Does
        nothing if `mismatch` is empty.

        mismatch: metrics of the difference between the log-probs of engine and trainer.
        """
        if not mismatch:
            return
        report = self.algorithm.mismatch_report(mismatch)
        self.monitor.text(step, "mismatch/worst", report.worst)
        if report.stop:
            raise UserError(f"step {step}: {report.text}")
        if report.text:
            logger.warning(f"step {step}: {report.text}")

    def evaluate(self, step: int) -> dict[str, float]:
        """Sample the held-out prompts, and return {name: score}; empty if the run has no held-out prompts.

        step: last step that was trained, under which the samples are logged.
        """
        return self.rollouts.evaluate(step)

    def report(self, step: int, trained_on: TrainedOn, metrics: Metrics, sampled: dict[str, float]) -> None:
        """Pass the results of a step to the monitor, and add them to the totals of the run.

        trained_on: the sequences that the step trained on.
        metrics: metrics of the training.
        sampled: scalars about the step's samples.
        """
        scalars = to_floats(metrics) | sampled | self.rollouts.metrics
        scalars = self.monitor.finish_step(step, scalars, trained_on)
        self.monitor.line(step, scalars)
        self.totals["seconds"] += scalars["time/step"]
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
        """Continue from a checkpoint. The caller continues the loop and opens the ledger at this checkpoint.

        state: the driver's state, read from the checkpoint's state.json.
        """
        self.totals = {name: float_or_nan(value) for name, value in state["totals"].items()}
        self.rollouts.load_state_dict(state)
        self.algorithm.load_state_dict(state["algorithm"])
        self.trainer.load_state_dict(state["trainer"])
