"""Rollouts in turn with training: each step's groups are sampled with the newest weights."""

from collections.abc import Callable
from dataclasses import replace

from grpo_megatron.batch.sample import Group
from grpo_megatron.data import PromptSource
from grpo_megatron.monitoring.monitor import Monitor
from grpo_megatron.rollout.evaluation import Evaluation
from grpo_megatron.rollout.handover import Handover
from grpo_megatron.rollout.source import EngineRollouts, Rollout


class SynchronousRollouts:
    """The training loop's interface to the engines: rollouts, weight syncs, device sharing and evaluations.

    ReplayedRollouts has the same interface, for runs without engines.
    """

    def __init__(
        self,
        source: EngineRollouts,
        prompts: PromptSource,
        handover: Handover,
        monitor: Monitor,
        evaluation: Evaluation | None = None,
        score: Callable[[list[Group]], list[Group]] | None = None,
        sampled: Callable[[], None] = lambda: None,
    ):
        """Connect the parts that a rollout needs.

        source: samples the groups.
        prompts: hands out the training prompts.
        handover: prepares the engines for generation, and the ranks for training.
        evaluation: scores held-out prompts. None if there are none.
        score: returns the groups with the rewards of a reward model, which runs on the trainer's ranks. None
            if there is no reward model.
        sampled: called after each generation, when the ranks have the memory of shared devices again.
        """
        self.source, self.prompts, self.handover = source, prompts, handover
        self._phases, self._evaluation, self._score = monitor.phases, evaluation, score
        self._sampled = sampled

    @property
    def version(self) -> int | None:
        """Version of the weights that the engines serve; 0 before the first sync. It is never None here."""
        return self.handover.weight_sync.version

    @property
    def metrics(self) -> dict[str, float]:
        """{name: value} of the last weight sync, and of the memory in use by engines and ranks."""
        return self.handover.metrics

    def start(self) -> None:
        """Copy the trainer's weights into the engines, which have none yet."""
        self.handover.publish()

    def take(self, step: int) -> Rollout:
        """Sample the groups of a step (from 1), and return them with rewards. Then the ranks can train."""
        self.handover.to_engines()
        with self._phases("generate"):
            rollout = self.source.sample(step, self.prompts)
        self.handover.to_ranks()
        self._sampled()
        if self._score is None:
            return rollout
        with self._phases("score"):
            return replace(rollout, groups=self._score(rollout.groups))

    def weights_changed(self) -> None:
        """Copy the trainer's weights into the engines, after a training step has changed them."""
        self.handover.publish()

    def evaluate(self, step: int) -> dict[str, float]:
        """Return {metric: score} on the held-out prompts; empty if there are none.

        step: number of training steps done so far.
        """
        if self._evaluation is None:
            return {}
        self.handover.to_engines()
        with self._phases("evaluate"):
            return self._evaluation.run(step)

    def state_dict(self) -> dict:
        return {
            "rollouts": self.source.state_dict(),
            "prompts": self.prompts.state_dict(),
            "weight_sync": self.handover.weight_sync.state_dict(),
        }

    def load_state_dict(self, state: dict) -> None:
        """Restore the state from a checkpoint.

        state: the run's state as `state_dict` returned it. Some entries are None if that run replayed a
            recording.
        """
        self.source.load_state_dict(state["rollouts"])
        if state["prompts"]:
            self.prompts.load_state_dict(state["prompts"])
        if state["weight_sync"]:
            self.handover.weight_sync.load_state_dict(state["weight_sync"])

    def close(self) -> None:
        self.source.close()
        self.handover.weight_sync.close()
