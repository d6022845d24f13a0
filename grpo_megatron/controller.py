"""The GRPO training loop: sample groups, score, weigh, train, sync weights, log."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from math import isnan

import numpy as np

from grpo_megatron.algorithm.coefficients import step_advantages, step_coefficients
from grpo_megatron.algorithm.correction import Correction
from grpo_megatron.algorithm.filters import apply_filters
from grpo_megatron.algorithm.kl import KLController
from grpo_megatron.algorithm.losses import PolicyLoss
from grpo_megatron.algorithm.mismatch import measure_mismatch, mismatch_report
from grpo_megatron.batch.sample import Group
from grpo_megatron.config.schema import Config, OldLogprobs
from grpo_megatron.data import PromptSource
from grpo_megatron.errors import UserError
from grpo_megatron.json_files import float_or_nan
from grpo_megatron.metrics import Metrics, merge, nan_max, to_floats
from grpo_megatron.monitoring.monitor import Monitor
from grpo_megatron.rewards.control import shuffle_rewards
from grpo_megatron.rewards.shaping import shape_overlong
from grpo_megatron.rollout.evaluation import Evaluation
from grpo_megatron.rollout.source import EngineRollouts, ReplayedRollouts
from grpo_megatron.rollout.statistics import step_statistics
from grpo_megatron.run.checkpoints import Checkpoints
from grpo_megatron.run.stop import StopRequest
from grpo_megatron.run.turns import State, Turns
from grpo_megatron.trainer.mini_batch import MiniBatch, make_mini_batches
from grpo_megatron.trainer.policy import PolicyTrainer
from grpo_megatron.weights.sync.sync import WeightSync


class Controller:
    """The GRPO training loop and its counters.

    It decides what happens in which order. The objects that it is given do the work: rollouts sample, the
    trainer trains, weight_sync updates the engines, the saver writes checkpoints.
    """

    def __init__(
        self,
        config: Config,
        trainer: PolicyTrainer,
        rollouts: EngineRollouts | ReplayedRollouts,
        prompts: PromptSource | None,
        weight_sync: WeightSync | None,
        evaluation: Evaluation | None,
        saver: Checkpoints,
        monitor: Monitor,
        turns: Turns | None = None,
        decode: Callable[[np.ndarray], str] | None = None,
        stop: StopRequest | None = None,
        score: Callable[[list[Group]], list[Group]] | None = None,
    ):
        """Connect the parts of a run, at step 0. `load_state_dict` continues from a checkpoint.

        prompts, weight_sync: None if recorded rollouts are replayed, which need neither
        evaluation: scores held-out prompts; None: there are none
        saver: writes checkpoints
        turns: moves the shared devices between engines and trainer ranks; None: each side has its own devices
        decode: converts token ids to text, to show the tokens that engine and trainer disagree about most
        stop: request to stop the run, checked after each step; None: there is never one
        score: returns groups with the rewards of a reward model that runs on the trainer's ranks; None:
            the rollouts come with rewards
        """
        self.config = config
        self.trainer, self.rollouts, self.prompts, self.weight_sync = trainer, rollouts, prompts, weight_sync
        self.evaluation, self.saver, self.monitor, self.turns, self.decode = (
            evaluation,
            saver,
            monitor,
            turns,
            decode,
        )
        recomputed = config.train.old_logprobs == OldLogprobs.recompute
        self.loss = PolicyLoss.from_config(config.algorithm, config.mismatch, known_before=recomputed)
        self.correction = Correction.from_config(config.mismatch) if recomputed else None
        self.kl_controller = KLController.from_config(config.algorithm.kl_ctrl)
        self.stop, self.score = stop or StopRequest(), score
        self.step = 0
        self.entropy: float | None = None  # mean over the last step's trained tokens
        self.totals = {"tokens": 0, "seconds": 0.0, "mismatch_max": 0.0}
        self.evaluations: dict[str, dict[str, float]] = {}  # before and after training
        self.evaluated = 0  # the step after which the "after" evaluation was made

    def run(self) -> dict:
        """Train until step run.total_steps.

        Returns a dict with the last step, the evaluations "before" and "after" training, and the totals of
        tokens, seconds and the largest mismatch. Raises Stopped after a step if the run was asked to stop.
        """
        self.sync_weights()
        if not self.evaluations.get("before"):
            self.evaluations = dict.fromkeys(("before", "after"), self.evaluate())
            self.evaluated = self.step
        while self.step < self.config.run.total_steps:
            self.step += 1
            self.stop.step = self.step
            self.train_step()
            self.leave_if_asked()
            last = self.step == self.config.run.total_steps
            if last or (self.config.eval.every and self.step % self.config.eval.every == 0):
                self.evaluate_after()
            due = self.saver.is_due(self.step, last)
            if due:
                self.ranks_turn()
            with self.monitor.phases("checkpoint"):
                self.saver.after_step(self.state_dict() if due else None)
            if not last:
                self.leave_if_asked()
        if self.evaluated != self.step:  # the run was stopped in its last step
            self.evaluate_after()
        return {"step": self.step, **self.evaluations, **self.totals}

    def leave_if_asked(self) -> None:
        """Save a checkpoint and raise Stopped, if the run was asked to stop. Called between steps."""
        if self.stop.is_made:
            self.ranks_turn()
            self.stop.leave(self.saver, self.state_dict)

    def train_step(self) -> None:
        phases = self.monitor.phases
        self.monitor.start_step(self.step)
        memory = self.engines_turn()
        with phases("generate"):
            rollout = self.rollouts.sample(self.step, self.prompts)
        self.ranks_turn()
        # Called here too, not only at the end of the step. A run that is stopped within the step, without
        # time to finish it, would otherwise leave a completely written checkpoint without its final name.
        self.saver.complete_written()
        scored = rollout.groups
        if self.score:
            with phases("score"):
                scored = self.score(scored)
        with phases("prepare"):
            groups = self.shape_and_filter(scored)
            version = self.weight_sync and self.weight_sync.version
            sampled = step_statistics(groups, rollout, self.config.eval.pass_reward, version)
            mini_batches = make_mini_batches(groups, self.config, self.trainer.cost_model, self.step)
        with phases("logprobs"):
            mismatch = self.old_and_reference_logprobs(mini_batches)
        with phases("prepare"):
            self.act_on_mismatch(mismatch, mini_batches)
            measured = self.set_coefficients(mini_batches)
        with phases("train"):
            trained = self.train(mini_batches)
        if not mismatch:
            # Only the first optimizer step sees the weights the engine sampled with.
            mismatch = {name: value for name, value in trained[0].items() if name.startswith("mismatch/")}
            self.act_on_mismatch(mismatch, mini_batches)
        if self.config.ref.reset_every and self.step % self.config.ref.reset_every == 0:
            with phases("reference"):
                self.trainer.reset_reference()
        if any(metrics["actor/dropped_steps"].result() == 0 for metrics in trained):
            self.sync_weights()
        metrics = {name: value for name, value in merge(trained).items() if not name.startswith("mismatch/")}
        self.saver.note_trained(self.step, rollout.used)
        self.report(groups, mini_batches, {**metrics, **mismatch, **measured}, sampled | memory)

    def shape_and_filter(self, groups: list[Group]) -> list[Group]:
        """Return the groups to train on, with the rewards to train on.

        Applies the penalty for overlong responses, the shuffling of rewards (a control experiment) and the
        group filters, as far as they are configured.
        """
        groups = shape_overlong(
            groups, self.config.rollout.max_response_length, self.config.reward.overlong_buffer
        )
        if self.config.reward.shuffle_control:
            groups = shuffle_rewards(groups, np.random.default_rng([self.config.run.seed, self.step]))
        return apply_filters(groups, self.config.algorithm)

    def old_and_reference_logprobs(self, mini_batches: list[MiniBatch]) -> Metrics:
        """Set each batch's log-probs of the old policy (old_logp) and of the reference model (ref_logp).

        Returns metrics of the mismatch between engine and trainer if the old log-probs were recomputed;
        otherwise empty, because the first optimizer step measures it.
        """
        mismatch = []
        for mini in mini_batches:
            batch = mini.batch
            if self.config.train.old_logprobs == OldLogprobs.recompute:
                batch.old_logp = self.trainer.logprobs(batch, mini.plan, key=mini.key)
                mismatch.append(measure_mismatch(batch))
            elif self.config.train.old_logprobs == OldLogprobs.rollout:
                batch.old_logp = batch.rollout_logp
        if self.config.algorithm.needs_reference:
            keep_hidden = self.loss.needs_full_kl
            with self.trainer.reference():
                for mini in mini_batches:
                    mini.batch.ref_logp = self.trainer.logprobs(
                        mini.batch, mini.plan, reference=True, key=mini.key, keep_hidden=keep_hidden
                    )
        return merge(mismatch)

    def set_coefficients(self, mini_batches: list[MiniBatch]) -> Metrics:
        """Set the coefficients of every token in the loss, such as advantage and weight.

        Returns metrics about them.
        """
        batches = [mini.batch for mini in mini_batches]
        advantages, metrics = step_advantages(batches, self.config.algorithm, self.kl_controller)
        parts = []
        for batch, advantage in zip(batches, advantages, strict=True):
            coefficients, measured = step_coefficients(batch, self.config, self.correction)
            batch.set(advantage=advantage, **vars(coefficients))
            parts.append(measured)
        return metrics | merge(parts)

    def train(self, mini_batches: list[MiniBatch]) -> list[Metrics]:
        """Make one optimizer step per mini-batch in each of train.ppo_epochs epochs.

        Returns the metrics of each optimizer step, in order. The entropy bonus is off while the last step's
        entropy is at or above algorithm.entropy_floor.
        """
        floor, current = (
            self.config.algorithm.entropy_floor,
            self.config.train.old_logprobs == OldLogprobs.current,
        )
        enough = floor is not None and (self.entropy is None or self.entropy >= floor)
        loss = self.loss
        if enough:
            loss = replace(loss, algorithm=replace(loss.algorithm, entropy_coeff=0.0))
        trained: list[Metrics] = []
        for mini in mini_batches * self.config.train.ppo_epochs:
            trained.append(self.trainer.train_step(mini.batch, mini.plan, loss, current, mini.key))
            # after the first step, policy and engine are expected to differ
            loss = replace(loss, mismatch_limit=None)
        entropy = merge(trained)["actor/entropy"].result()
        self.entropy = self.entropy if isnan(entropy) else entropy
        return trained

    def act_on_mismatch(self, mismatch: Metrics, mini_batches: list[MiniBatch]) -> None:
        """Log the tokens that engine and trainer disagree about most, and apply mismatch.action.

        Depending on that setting, a mismatch beyond the limit shows a warning or raises UserError. Does
        nothing if `mismatch` is empty.
        """
        if mismatch:
            report = mismatch_report(
                mismatch, [mini.batch for mini in mini_batches], self.config.mismatch, self.decode
            )
            self.monitor.text(self.step, "mismatch/worst", report.worst)
            if report.stop:
                raise UserError(f"step {self.step}: {report.text}")
            if report.text:
                self.monitor.say(f"step {self.step}: {report.text}")

    def ranks_turn(self) -> None:
        """Have engines on the trainer's devices release their memory, so that the ranks can work.

        Does nothing if the engines have devices of their own.
        """
        if self.turns:
            self.turns.to_ranks()

    def engines_turn(self) -> dict[str, float]:
        """Prepare for a time in which only the engines work. Return memory metrics of ranks put to sleep.

        Engines on the trainer's devices get their memory back, and the last synced weights are synced again.
        Engines on devices of their own need nothing. The trainer's ranks then sleep if megatron.sleep is set.
        """
        if self.turns:
            if self.turns.state == State.training:
                self.sync_weights(changed=False)
            return {}
        if not self.config.megatron.sleep:
            return {}
        with self.monitor.phases("sleep"):
            return self.trainer.sleep()

    def sync_weights(self, changed: bool = True) -> None:
        """Copy the current weights into the engines, which tag every sample with the weights' version.

        changed: whether the weights differ from those synced last; if so, they get a new version.

        If engines and ranks share devices, the engines have them afterwards. Does nothing in a replay of
        recorded rollouts.
        """
        if not self.weight_sync:
            return
        run = partial(self.weight_sync.run, changed)
        if self.turns:
            self.turns.to_engines(run)
        else:
            with self.monitor.phases("sync"):
                run()
        with self.monitor.phases("probe"):
            self.weight_sync.probe()

    def evaluate(self) -> dict[str, float]:
        if self.evaluation is None:
            return {}
        self.engines_turn()
        with self.monitor.phases("evaluate"):
            scalars = self.evaluation.run(self.step)
        self.monitor.evaluated(self.step, scalars)
        return scalars

    def evaluate_after(self) -> None:
        self.evaluations["after"], self.evaluated = self.evaluate(), self.step

    def report(
        self, groups, mini_batches: list[MiniBatch], metrics: Metrics, others: dict[str, float]
    ) -> None:
        scalars = to_floats(metrics) | others | (self.weight_sync.metrics if self.weight_sync else {})
        scalars |= self.turns.metrics if self.turns else {}
        batches = [mini.batch for mini in mini_batches]
        scalars = self.monitor.finish_step(self.step, scalars, batches, groups, self.config.train.ppo_epochs)
        self.monitor.line(self.step, scalars)
        self.totals["tokens"] += sum(batch.num_tokens for batch in batches)
        self.totals["seconds"] += scalars["time/step"]
        self.totals["mismatch_max"] = nan_max(self.totals["mismatch_max"], scalars["mismatch/max"])

    def state_dict(self) -> dict:
        return {
            "step": self.step,
            "totals": self.totals,
            "rollouts": self.rollouts.state_dict(),
            "prompts": self.prompts.state_dict() if self.prompts else None,
            "weight_sync": self.weight_sync.state_dict() if self.weight_sync else None,
            "algorithm": {"kl_controller": self.kl_controller.state_dict(), "entropy": self.entropy},
            "trainer": self.trainer.state_dict(),
            "evaluations": self.evaluations,
            "evaluated": self.evaluated,
        }

    def load_state_dict(self, state: dict) -> None:
        self.step = state["step"]
        self.totals = {name: float_or_nan(value) for name, value in state["totals"].items()}
        self.rollouts.load_state_dict(state["rollouts"])
        # A replayed run has neither prompts nor engines.
        if self.prompts and state["prompts"]:
            self.prompts.load_state_dict(state["prompts"])
        if self.weight_sync and state["weight_sync"]:
            self.weight_sync.load_state_dict(state["weight_sync"])
        self.kl_controller.load_state_dict(state["algorithm"]["kl_controller"])
        self.entropy = state["algorithm"]["entropy"]
        self.trainer.load_state_dict(state["trainer"])
        self.evaluations, self.evaluated = state["evaluations"], state["evaluated"]
