"""Sources of a step's groups: the engines, or a recording."""

from dataclasses import dataclass, field

from grpo_megatron.algorithm.advantages import smallest_group
from grpo_megatron.algorithm.filters import filtered
from grpo_megatron.batch.sample import Group
from grpo_megatron.config.rollout import Shortage
from grpo_megatron.config.schema import Config
from grpo_megatron.data import PromptSource
from grpo_megatron.errors import UserError
from grpo_megatron.monitoring.phases import Phases
from grpo_megatron.rewards.shaping import shape_overlong
from grpo_megatron.rollout.manager import Filled, Goal, RolloutManager
from grpo_megatron.rollout.recording.record import Recorder
from grpo_megatron.rollout.recording.replay import Replay
from grpo_megatron.samples.entries import LeftOut, SampleState, rows_of

ABORTED = "its group was aborted when the batch was full; the prompt is used later"
TOO_FEW = "too few samples of its group are left, because rewards or environments failed"


@dataclass(frozen=True)
class Rollout:
    """The groups that were sampled for a training step, and what was left out of the step."""

    groups: list[Group]
    """Groups to train on."""
    dropped: int = 0
    """Number of groups that dynamic sampling left out because algorithm.filters refused them."""
    aborted: int = 0
    """Number of groups that dynamic sampling aborted, because the batch was full before they were done."""
    failed: list[Group] = field(default_factory=list)
    """Groups that are not trained on, because so many rewards failed that too few samples are left."""
    left_out: list[LeftOut] = field(default_factory=list)
    """The samples of dropped, aborted and failed groups, for the ledger."""


class EngineRollouts:
    """Samples each training step's groups from the engines, and records them if rollout.record is set."""

    def __init__(self, manager: RolloutManager, config: Config, resumed: int = 0):
        """Prepare sampling, and open the recording if rollout.record is set.

        resumed: step of the checkpoint that a resumed run continues from. 0 for a new run.
        """
        self._manager, self._config = manager, config
        self._batch_size = config.data.train_batch_size
        self._recorder = None
        if config.rollout.record:
            self._recorder = Recorder(config.rollout.record, manager, resumed)

    def sample(self, step: int, prompts: PromptSource) -> Rollout:
        """Sample the groups of a training step from the next data.train_batch_size prompts.

        Dynamic sampling, if enabled, uses further prompts until algorithm.filters have accepted
        data.train_batch_size groups, or until rollout.dynamic_sampling.max_batches is reached.

        step: index of the step, from 1, for the recording and for messages.
        prompts: hands out the prompts, and takes back those that dynamic sampling did not need.

        Raises UserError if no group is left. Raises UserError if dynamic sampling does not fill the batch and
        rollout.dynamic_sampling.shortage=error.
        """
        failed: list[Group] = []
        left_out: list[LeftOut] = []
        n = self._config.rollout.n
        if self._config.rollout.dynamic_sampling.enabled:
            filled = self._fill(step, prompts, failed, left_out)
        else:
            filled = Filled(self._manager.generate(prompts.next(self._batch_size), self._config.rollout))
            failed += [group for group in filled.groups if self._is_too_small(group)]
            filled.dropped += [group.prompt for group in failed]
            filled.groups = [group for group in filled.groups if not self._is_too_small(group)]
            if not filled.groups:
                raise UserError(
                    f"step {step}: none of the {len(failed)} groups is left, because rewards or "
                    "environments failed for nearly all samples and reward.on_failure=leave_out removes "
                    "them; see the messages above and the workers' logs for the cause"
                )
        prompts.settle([group.prompt for group in filled.aborted])
        left_out.append(LeftOut(rows_of(filled.aborted, n), SampleState.lost, ABORTED))
        left_out.append(LeftOut(rows_of(failed, n), SampleState.failed, TOO_FEW))
        if self._recorder:
            self._recorder.write(step, filled.groups)
        dropped = len(filled.dropped) - len(failed)
        return Rollout(filled.groups, dropped, len(filled.aborted), failed, left_out)

    def _is_too_small(self, group: Group) -> bool:
        """Return True if samples of the group failed, and too few are left for the advantage estimator."""
        return group.failed > 0 and len(group.trajectories) < smallest_group(
            self._config.algorithm.adv_estimator
        )

    def _fill(self, step: int, prompts: PromptSource, failed: list[Group], left_out: list[LeftOut]) -> Filled:
        """Sample until algorithm.filters have accepted enough groups (dynamic sampling).

        step: index of the step, for messages.
        prompts: hands out the prompts.
        failed: a list, to which this method appends groups with too few samples (`_is_too_small`).
        left_out: a list, to which this method appends the samples of groups that a filter refuses.

        Returns the accepted groups, and the prompts that were left out.
        """
        rollout = self._config.rollout
        options = rollout.dynamic_sampling
        most = int(options.max_batches * self._batch_size)

        def keep(group: Group) -> bool:
            if self._is_too_small(group):
                failed.append(group)
                return False
            refused = self._refused_by(group)
            if refused:
                # Keep only numbers: many groups may be dropped, and their tokens take memory.
                left_out.append(LeftOut(rows_of([group], rollout.n), SampleState.filtered, refused))
            return refused is None

        filled = self._manager.fill(
            prompts.next, keep, rollout, Goal(self._batch_size, options.over_sampling, most)
        )
        short = self._batch_size - len(filled.groups)
        if short and (options.shortage == Shortage.error or not filled.groups):
            because = f", and failed rewards left too few samples of {len(failed)} groups" if failed else ""
            raise UserError(
                f"step {step}: algorithm.filters left only {len(filled.groups)} of the {self._batch_size} "
                f"groups that data.train_batch_size needs, after sampling the {most} prompts that "
                f"rollout.dynamic_sampling.max_batches allows{because}; use easier or harder prompts, raise "
                "rollout.dynamic_sampling.max_batches or rollout.n, or set "
                "rollout.dynamic_sampling.shortage=smaller"
            )
        return filled

    def _refused_by(self, group: Group) -> str | None:
        """Return the name of the filter in algorithm.filters that refuses the group; None if all accept it.

        The filters see rewards with the overlong penalty.
        """
        config = self._config
        shaped = shape_overlong([group], config.rollout.max_response_length, config.reward.overlong_buffer)
        found = filtered(shaped, config.algorithm.filters)
        return (
            None if found.groups else next(name for name, samples in reversed(found.removed) if len(samples))
        )

    def cancel(self) -> None:
        """End a call of `sample` in another thread soon, by an asyncio.CancelledError."""
        self._manager.cancel()

    def state_dict(self) -> dict:
        return self._manager.state_dict()

    def load_state_dict(self, state: dict) -> None:
        if state:  # empty if the checkpoint belongs to a replayed run
            self._manager.load_state_dict(state)


class ReplayedRollouts:
    """Reads each training step's groups from a recording (rollout.replay), for a run without engines.

    The class has the same interface as rollout.pipeline.RolloutPipeline, which samples from engines.
    """

    def __init__(self, path: str, phases: Phases):
        """Open the recording.

        path: path of the recording.
        phases: measures the time of reading, as the phase `generate` of a step.
        """
        self._replay, self._phases = Replay(path), phases
        self.version: int | None = None
        self.metrics: dict[str, float] = {}

    def start(self) -> None:
        pass

    def take(self, step: int) -> Rollout:
        with self._phases("generate"):
            return Rollout(self._replay.read(step))

    def weights_changed(self) -> None:
        pass

    def evaluate(self, step: int) -> dict[str, float]:
        return {}

    def state_dict(self) -> dict:
        return {"rollouts": {}, "prompts": None, "weight_sync": None}

    def load_state_dict(self, state: dict) -> None:
        pass

    def close(self) -> None:
        pass
