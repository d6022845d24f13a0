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
    """Everything that the training loop knows of engines: rollouts, weights, devices and evaluations.

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

        evaluation: scores held-out prompts; None: there are none.
        score: returns groups with the rewards of a reward model on the trainer's ranks; None: the source's
            groups have their rewards already.
        sampled: called after each generation, when the ranks have their devices again.
        """
        self.source, self.prompts, self.handover = source, prompts, handover
        self._phases, self._evaluation, self._score = monitor.phases, evaluation, score
        self._sampled = sampled

    @property
    def version(self) -> int | None:
        """Version of the weights that the engines serve; None if there are no engines."""
        return self.handover.weight_sync.version

    @property
    def metrics(self) -> dict[str, float]:
        """Metrics of weight syncs, and of memory that engines and ranks handed over."""
        return self.handover.metrics

    def start(self) -> None:
        """Give the engines their first weights."""
        self.handover.publish()

    def take(self, step: int) -> Rollout:
        """Sample the groups of a step, with rewards. The ranks can work afterwards."""
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
        """Give the engines the trainer's new weights."""
        self.handover.publish()

    def evaluate(self, step: int) -> dict[str, float]:
        """Return the scores of the held-out prompts; empty if there are none."""
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
        """Continue from a checkpoint. state: the run's, of which some entries are None after a replay."""
        self.source.load_state_dict(state["rollouts"])
        if state["prompts"]:
            self.prompts.load_state_dict(state["prompts"])
        if state["weight_sync"]:
            self.handover.weight_sync.load_state_dict(state["weight_sync"])

    def close(self) -> None:
        self.source.close()
        self.handover.weight_sync.close()
