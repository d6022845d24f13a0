"""Rollouts for the training loop: sampled in alternation with training, or ahead while training goes on."""

import logging
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace

from grpo_megatron.batch.sample import Group
from grpo_megatron.monitoring.monitor import Monitor
from grpo_megatron.rollout.evaluation import Evaluation
from grpo_megatron.rollout.evaluation_beside import EvaluationBeside
from grpo_megatron.rollout.handover import Handover
from grpo_megatron.rollout.source import EngineRollouts, Rollout

logger = logging.getLogger(__name__)


class RolloutPipeline:
    """The training loop's interface to the engines: samples rollouts, syncs weights and runs evaluations.

    With rollout.staleness=0, sampling and training alternate. With a larger value, up to that many batches
    are sampled while the trainer works on the batches before them.

    If engines and trainer share devices, this object also passes the devices' memory between the two.
    ReplayedRollouts, which reads the samples from a recording, has the same interface.
    """

    def __init__(
        self,
        source: EngineRollouts,
        handover: Handover,
        monitor: Monitor,
        evaluation: Evaluation | None = None,
        beside: EvaluationBeside | None = None,
        score: Callable[[list[Group]], list[Group]] | None = None,
        sampled: Callable[[], None] = lambda: None,
    ):
        """Create the pipeline of rollouts, weight syncs and evaluations.

        source: samples the groups of a step.
        handover: copies weights into the engines, and moves the memory of shared devices.
        monitor: measures the time of generation and evaluation, and gets scores of evaluations.
        evaluation: evaluates the weights on held-out prompts. None if there are no such prompts.
        beside: runs evaluations beside training. None: evaluations interrupt training.
        score: function that returns groups with the rewards of a reward model on the trainer's ranks. None if
            there is no such reward model.
        sampled: function that is called after each generation, when the ranks have the memory of shared
            devices again.
        """
        self.source, self.handover = source, handover
        self._phases, self._evaluation, self._score = monitor.phases, evaluation, score
        self._beside, self._monitor = beside, monitor
        self._step = 0  # number of training steps done so far
        self._unfinished: int | None = None  # `EvaluationBeside.step` at the checkpoint
        self._sampled = sampled

    @property
    def version(self) -> int | None:
        """Version of the weights that the engines serve; 0 before the first sync.

        It is never None here. ReplayedRollouts, for runs without engines, has the version None.
        """
        return self.handover.weight_sync.version

    @property
    def metrics(self) -> dict[str, float]:
        """Metrics {name: value} of the last weight sync, of memory use, and of the sampling of groups."""
        return self.handover.metrics | self.source.metrics

    def start(self) -> None:
        """Copy the trainer's weights into the engines for the first time.

        The run may continue from a checkpoint that was written while an evaluation was in progress. This
        evaluation is then made again, beside training if possible. If it was to evaluate the weights of an
        earlier step than the checkpoint's, these weights are gone, and only a warning is logged.
        """
        self.handover.publish()
        if self._evaluation is None or self._unfinished is None:
            return
        if self._unfinished != self._step:
            logger.warning(
                f"the evaluation after {self._unfinished} steps had not ended at the checkpoint of step "
                f"{self._step}. It will not be repeated, because its weights are gone"
            )
        elif not (self._beside and self._beside.begin(self._step)):
            self._monitor.evaluated(self._step, self._evaluate_now(self._step))

    def take(self, step: int) -> Rollout:
        """Sample the groups of a training step, and return them with rewards.

        If engines and ranks share devices, the engines get the devices' memory for the sampling. Afterwards
        the ranks get it back. If an evaluation beside training has ended, its scores are passed to the
        monitor.

        step: index of the step, from 1.

        Raises the errors of EngineRollouts.take, such as UserError if no group is left to train on.
        """
        self._step = step - 1
        self._report()
        self.handover.to_engines()
        with self._phases("generate"):
            rollout = self.source.take(step, self._revive)
        self._step = step
        self.handover.to_ranks()
        self._sampled()
        if self._score is None:
            return rollout
        with self._phases("score"):
            return replace(rollout, groups=self._score(rollout.groups))

    def _report(self, wait: bool = False) -> bool:
        return self._beside is not None and self._beside.report(self._step, wait)

    def _revive(self) -> None:
        """Copy the weights into engines that have been restarted or were held for an evaluation.

        `take` calls this method while it waits and no engine serves.
        """
        self._report()
        if self.handover.weight_sync.is_waited_for:
            self.handover.publish(changed=False)

    def weights_changed(self) -> None:
        """Copy the trainer's weights into the engines, after a training step has changed them.

        With rollout.on_update=wait, the copy begins only when no group is being sampled.
        """
        self._publish()

    def _publish(self, changed: bool = True) -> None:
        """Copy the trainer's weights into the engines. No group is started meanwhile.

        changed: True if the weights differ from those of the last sync. The version of the weights then
            increases by one.
        """
        with ExitStack() as updating:
            with self._phases("generate"):  # the driver may have to wait for groups that are being sampled
                updating.enter_context(self.source.updating(changed))
            self._report()  # engines that an evaluation no longer needs get the weights, too
            self.handover.publish(changed)

    def evaluate(self, step: int) -> dict[str, float]:
        """Evaluate the engines' weights on the held-out prompts. Return {metric: score}; {} without prompts.

        With eval.beside, this method waits until an earlier evaluation has ended. Then it only begins the new
        evaluation beside training, and returns {}. A later call of `take`, `weights_changed` or `evaluate`
        passes the scores to the monitor. Before the first and after the last step, and if only one engine
        serves, the new evaluation interrupts training as without eval.beside.

        step: number of training steps done so far.
        """
        if self._evaluation is None:
            return {}
        with self._phases("evaluate"):
            has_released = self._report(wait=True)
        if has_released:
            self._publish(changed=False)
        if self._beside and self._beside.begin(step):
            return {}
        return self._evaluate_now(step)

    def _evaluate_now(self, step: int) -> dict[str, float]:
        self.handover.to_engines()
        with self._phases("evaluate"):
            return self._evaluation.run(step)

    def state_dict(self) -> dict:
        state = {"weight_sync": self.handover.weight_sync.state_dict()}
        if self._beside:
            state["evaluation_beside"] = {"step": self._beside.step}
        return self.source.state_dict() | state

    def load_state_dict(self, state: dict) -> None:
        """Restore the state of prompts, groups and weight syncs from a checkpoint.

        state: the state as `state_dict` returned it. If the checkpoint is from a run that replayed a
            recording, it has no such state, and nothing of prompts, groups and weight syncs is restored.
        """
        self.source.load_state_dict(state)
        if state["weight_sync"]:
            self.handover.weight_sync.load_state_dict(state["weight_sync"])
        self._step = state.get("step", 0)
        self._unfinished = state.get("evaluation_beside", {}).get("step")

    def close(self) -> None:
        if self._beside:
            self._beside.close()
        self.source.close()
        self.handover.weight_sync.close()
