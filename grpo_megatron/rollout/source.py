"""Sources of a step's groups: the engines, or a recording."""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace

from grpo_megatron.algorithm.advantages import smallest_group
from grpo_megatron.algorithm.filters import filtered
from grpo_megatron.batch.sample import Group
from grpo_megatron.config.derived import most_engines
from grpo_megatron.config.rollout import Shortage
from grpo_megatron.config.schema import Config
from grpo_megatron.data import PromptSource
from grpo_megatron.errors import UserError
from grpo_megatron.monitoring.phases import Phases
from grpo_megatron.rewards.shaping import shape_overlong
from grpo_megatron.rollout.manager import RolloutManager
from grpo_megatron.rollout.recording.record import Recorder
from grpo_megatron.rollout.recording.replay import Replay
from grpo_megatron.rollout.slots import GroupSlots
from grpo_megatron.rollout.stream import GroupStream, Sampled
from grpo_megatron.samples.entries import LeftOut, SampleState, rows_of

ABORTED = "its group was aborted when the batch was full; the prompt is used later"
TOO_FEW = "too few samples of its group are left, because rewards or environments failed"


@dataclass(frozen=True)
class Rollout:
    """The groups that were sampled for a training step, and what was left out of the step."""

    groups: list[Group]
    """Groups to train on. algorithm.filters may still remove some."""
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

    def __init__(self, manager: RolloutManager, config: Config, prompts: PromptSource, resumed: int = 0):
        """Prepare the sampling of training groups, and open the recording if rollout.record is set.

        manager: generates the samples and scores them.
        prompts: hands out the training prompts.
        resumed: step of the checkpoint that a resumed run continues from. 0 for a new run.
        """
        self._manager, self._config, self._prompts = manager, config, prompts
        rollout, batch_size = config.rollout, config.data.train_batch_size
        self._options = rollout.dynamic_sampling
        self._most = int(self._options.max_batches * batch_size) if self._options.enabled else math.inf
        slots = GroupSlots(
            batch_size,
            rollout.staleness,
            rollout.order,
            self._options.over_sampling if self._options.enabled else 1.0,
            self._most,
            config.run.total_steps - resumed,
        )
        self._stream = GroupStream(manager, self._next_groups, self._judge, rollout, slots)
        self._slots = slots
        self._unsettled_ids: list[int] = []  # of groups that no step had taken at the checkpoint
        self._recorder = None
        if config.rollout.record:
            self._recorder = Recorder(config.rollout.record, manager, resumed)

    def take(self, step: int, revive: Callable[[], None] = lambda: None) -> Rollout:
        """Return the groups of a training step. If they were not sampled ahead, wait until they are sampled.

        The step uses data.train_batch_size prompts. A group is not trained on if failed rewards left too few
        of its samples. Dynamic sampling, if enabled, uses further prompts until data.train_batch_size groups
        can be trained on, or until rollout.dynamic_sampling.max_batches is reached.

        The returned groups are written to the recording (rollout.record). Prompts of groups that were aborted
        because the batch was full go back to the prompt source.

        step: index of the step, from 1, for the recording and for messages.
        revive: called while this method waits and no engine serves. It syncs the weights to engines that have
            come back, so that they serve again.

        Raises UserError if no group is left to train on, or if dynamic sampling does not fill the batch and
        rollout.dynamic_sampling.shortage=error. Raises the errors of RolloutManager.generate.
        """
        taken = self._stream.take(revive)
        groups = [one.group for one in taken.batch if one.left_out is None]
        left = [one for one in (*taken.batch, *taken.refused) if one.left_out is not None]
        failed = [one.group for one in left if one.left_out.state == SampleState.failed]
        aborted = [one.group for one in taken.surplus]
        self._must_suffice(step, groups, failed)
        with self._stream.lock:
            self._prompts.settle([one.group.prompt for one in (*taken.batch, *taken.refused)])
            self._prompts.take_back([group.prompt for group in aborted])
        left_out = [one.left_out for one in left]
        left_out.append(LeftOut(rows_of(aborted, self._config.rollout.n), SampleState.lost, ABORTED))
        if self._recorder:
            self._recorder.write(step, groups)
        return Rollout(groups, len(left) - len(failed), len(aborted), failed, left_out)

    def _next_groups(self, count: int) -> list[Group]:
        """Create groups for the next `count` prompts. The groups have no samples yet.

        After a resume, the first groups get the ids of groups that were started before the checkpoint was
        written, and that no step had taken by then.
        """
        again, self._unsettled_ids = self._unsettled_ids[:count], self._unsettled_ids[count:]
        ids = [*again, *self._manager.take_ids(count - len(again))]
        return [Group(id, prompt, ()) for id, prompt in zip(ids, self._prompts.next(count), strict=True)]

    def _judge(self, one: Sampled) -> bool:
        """Decide whether a finished group is trained on. If it is not, set one.left_out to the reason.

        Return False if another group is to be sampled in its place. Only dynamic sampling does this. Without
        dynamic sampling, the result is always True, and the step trains on fewer groups.

        one: the finished group.
        """
        n = self._config.rollout.n
        if self._is_too_small(one.group):
            one.left_out = LeftOut(rows_of([one.group], n), SampleState.failed, TOO_FEW)
        elif self._options.enabled and (refused := self._refused_by(one.group)):
            one.left_out = LeftOut(rows_of([one.group], n), SampleState.filtered, refused)
            # Keep only numbers: many groups may be refused, and their tokens take memory.
            one.group = replace(one.group, samples=())
        return one.left_out is None or not self._options.enabled

    def _is_too_small(self, group: Group) -> bool:
        """Return True if samples of the group failed, and too few are left for the advantage estimator."""
        return group.failed > 0 and len(group.trajectories) < smallest_group(
            self._config.algorithm.adv_estimator
        )

    def _must_suffice(self, step: int, groups: list[Group], failed: list[Group]) -> None:
        """Raise UserError if a step has too few groups to train on.

        Without dynamic sampling, one group is enough. With it, a full batch is required, or at least one
        group if rollout.dynamic_sampling.shortage=smaller.

        step: index of the step, for messages.
        groups: the groups to train on.
        failed: the groups that are not trained on, because so many rewards or environments failed that too
            few samples are left.
        """
        batch_size, options = self._config.data.train_batch_size, self._options
        if not options.enabled and not groups:
            raise UserError(
                f"step {step}: none of the {len(failed)} groups is left, because rewards or environments "
                "failed for nearly all samples and reward.on_failure=leave_out removes them; see the "
                "messages above and the workers' logs for the cause"
            )
        is_short = options.enabled and len(groups) < batch_size
        if is_short and (options.shortage == Shortage.error or not groups):
            because = f", and failed rewards left too few samples of {len(failed)} groups" if failed else ""
            raise UserError(
                f"step {step}: algorithm.filters left only {len(groups)} of the {batch_size} groups that "
                f"data.train_batch_size needs, after sampling the {self._most} prompts that "
                f"rollout.dynamic_sampling.max_batches allows{because}; use easier or harder prompts, raise "
                "rollout.dynamic_sampling.max_batches or rollout.n, or set "
                "rollout.dynamic_sampling.shortage=smaller"
            )

    def _refused_by(self, group: Group) -> str | None:
        """Return the name of the filter in algorithm.filters that refuses the group; None if all accept it.

        The filters see the rewards after the overlong penalty (reward.overlong_buffer).
        """
        config = self._config
        shaped = shape_overlong([group], config.rollout.max_response_length, config.reward.overlong_buffer)
        found = filtered(shaped, config.algorithm.filters)
        return (
            None if found.groups else next(name for name, samples in reversed(found.removed) if len(samples))
        )

    def updating(self, changed: bool = True) -> AbstractContextManager[None]:
        """Return a context in which the engines can get weights, because no group is started within it.

        changed: True if the weights are new. False if the engines get the weights of the last update again.
        """
        return self._stream.updating(changed)

    @property
    def metrics(self) -> dict[str, float]:
        """Metrics {name: value} about engines and sampling ahead.

        The training loop reads this property once per step. Each access sets the counter of
        rollout/sampling_seconds back to 0.
        """
        measured = {}
        if most_engines(self._config.rollout.engine) > 1:
            measured["rollout/engines"] = float(self._manager.num_serving)
        if not self._config.rollout.staleness:
            return measured
        return measured | {
            "rollout/sampling_seconds": self._stream.take_busy(),
            "rollout/groups_in_progress": float(self._slots.in_progress),
            "rollout/groups_waiting": float(self._slots.waiting),
        }

    def state_dict(self) -> dict:
        """Return the state for a checkpoint: {"rollouts": ids of groups, "prompts": state of the prompts}.

        Samples of groups that no step has taken are not saved. A run that continues from the checkpoint first
        samples these groups again, with the same ids.
        """
        with self._stream.lock:
            unsettled = [one.group.group_id for one in self._slots.items] + self._unsettled_ids
            prompts = self._prompts.state_dict()
            return {"rollouts": self._manager.state_dict() | {"unsettled": unsettled}, "prompts": prompts}

    def load_state_dict(self, state: dict) -> None:
        """Restore the state that `state_dict` returned for a checkpoint.

        If the checkpoint is from a run that replayed a recording, the state is empty, and nothing changes.
        """
        if state["rollouts"]:
            self._manager.load_state_dict(state["rollouts"])
            self._unsettled_ids = state["rollouts"].get("unsettled", [])
        if state["prompts"]:
            self._prompts.load_state_dict(state["prompts"])

    def close(self) -> None:
        self._stream.close()


class ReplayedRollouts:
    """Reads each training step's groups from a recording (rollout.replay), for a run without engines.

    The class has the same interface as rollout.pipeline.RolloutPipeline, which samples from engines.
    """

    def __init__(self, path: str, phases: Phases):
        """Open the recording.

        path: path of the recording.
        phases: measures the time of reading, as the phase `generate` of a step.

        Raises UserError if `path` is not a recording, or if the recording is damaged.
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
