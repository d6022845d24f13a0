"""RolloutManager: generates groups of scored samples from prompts."""

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from grpo_megatron.batch.prompt import Prompt
from grpo_megatron.batch.sample import Group, Sample
from grpo_megatron.config.rollout import RolloutConfig
from grpo_megatron.rollout.groups import GroupRequest, Round
from grpo_megatron.rollout.recording.arrays import RecordedArrays, RecordedHandles


@dataclass(frozen=True)
class Goal:
    """Batch size of dynamic sampling (`RolloutManager.fill`), and limits for the generation."""

    groups: int
    """Number of groups that fill the batch."""
    in_flight: float
    """Factor of at least 1: while the batch lacks N groups, N * in_flight groups are generated at a time."""
    most: int
    """Maximum number of prompts to use for one batch."""


@dataclass
class Filled:
    """The result of `RolloutManager.fill`: groups for a batch, and prompts that are not in the batch."""

    groups: list[Group] = field(default_factory=list)
    """Groups that the caller's function `keep` accepted, at most Goal.groups."""
    dropped: list[Prompt] = field(default_factory=list)
    """Prompts of the groups that `keep` refused."""
    aborted: list[Group] = field(default_factory=list)
    """Groups that were not needed, because the batch was full before they were done. Most lack samples."""


class Sampler(Protocol):
    """Interface to a GroupSampler, which may be in another process (rollout.worker.RolloutWorker)."""

    async def begin(self, round: Round) -> None: ...

    async def sample(self, request: GroupRequest) -> tuple[Sample, ...]: ...

    async def end(self) -> None: ...

    async def write_samples(self, path: Path, handles: Sequence[RecordedHandles]) -> OSError | None: ...


class Engines(Protocol):
    """The part of EnginePool that RolloutManager uses."""

    weight_version: int
    end_ids: frozenset[int]

    def new_client_id(self) -> int: ...


class RolloutManager:
    """Generates samples on all engines concurrently, scores them, and groups them by prompt."""

    def __init__(self, engines: Engines, samplers: Sequence[Sampler]):
        """Create a manager, which numbers its groups from 0.

        engines: the engines that generate the turns of the model.
        samplers: for each engine, the sampler that sends requests to it. Engines of one node share a sampler.
        """
        self._engines, self._samplers = engines, samplers
        self._next_group = 0

    def generate(
        self, prompts: list[Prompt], rollout: RolloutConfig, same_states: bool = False
    ) -> list[Group]:
        """Generate and score `rollout.n` samples for each prompt. Return groups in the order of the prompts.

        rollout: settings such as the number of samples and the temperature.
        same_states: if True, an environment's initial state depends only on the prompt, so that evaluations
            at different steps are comparable.

        With reward.on_failure=leave_out, failed samples are left out of their group, which may become empty.

        Raises UserError if an engine dies, or finishes no request for rollout.engine.request_timeout seconds.
        Raises the errors of rewards and environments.
        """
        groups = asyncio.run(self._generate(prompts, rollout, same_states))
        self._next_group += len(prompts)
        return groups

    async def _generate(
        self, prompts: list[Prompt], rollout: RolloutConfig, same_states: bool
    ) -> list[Group]:
        await self._begin(rollout, same_states)
        return await asyncio.gather(*(self._group(prompt, i, rollout.n) for i, prompt in enumerate(prompts)))

    async def _begin(self, rollout: RolloutConfig, same_states: bool = False) -> None:
        """Begin a round in all samplers."""
        engines = self._engines
        client_id, version, end_ids = engines.new_client_id(), engines.weight_version, engines.end_ids
        round = Round(client_id, rollout, same_states, version, end_ids)
        await asyncio.gather(*(sampler.begin(round) for sampler in set(self._samplers)))

    def fill(
        self,
        draw: Callable[[int], list[Prompt]],
        keep: Callable[[Group], bool],
        rollout: RolloutConfig,
        goal: Goal,
    ) -> Filled:
        """Generate groups until `keep` has accepted `goal.groups` of them, or `goal.most` prompts are used.

        This is dynamic sampling. The accepted groups are returned in the order of their prompts.

        draw: function that returns the next prompts. Its argument is the number of prompts.
        keep: function that decides whether a group is accepted for the batch. It is called when the group is
            done.
        rollout: settings such as the number of samples and the temperature.
        goal: size of the batch and limits.

        Raises UserError if an engine dies, or finishes no request for rollout.engine.request_timeout seconds.
        """
        return asyncio.run(self._fill(draw, keep, rollout, goal))

    async def _fill(self, draw, keep, rollout: RolloutConfig, goal: Goal) -> Filled:
        filled, asked = Filled(), 0
        await self._begin(rollout)
        running: dict[asyncio.Task[Group], Group] = {}  # to a group that has no samples yet
        try:
            while len(filled.groups) < goal.groups:
                wanted = math.ceil((goal.groups - len(filled.groups)) * goal.in_flight) - len(running)
                for prompt in draw(min(max(wanted, 0), goal.most - asked)):
                    task = asyncio.create_task(self._group(prompt, asked, rollout.n))
                    running[task] = Group(self._next_group + asked, prompt, ())
                    asked += 1
                if not running:
                    break
                done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for group in sorted((task.result() for task in done), key=lambda group: group.group_id):
                    full = len(filled.groups) == goal.groups
                    if full:
                        filled.aborted.append(group)
                    elif keep(group):
                        filled.groups.append(group)
                    else:
                        filled.dropped.append(group.prompt)
                for task in done:
                    del running[task]
        finally:
            # Do this even if one task failed, so that the errors of the others are retrieved too.
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
        if running:
            await asyncio.gather(*(sampler.end() for sampler in set(self._samplers)))
        filled.aborted += running.values()
        filled.groups.sort(key=lambda group: group.group_id)
        self._next_group += asked
        return filled

    async def _group(self, prompt: Prompt, index: int, size: int) -> Group:
        """Return a sampled group.

        index: index of the group within the round. It also selects the engine.
        size: number of samples that are drawn. Those whose reward failed may be missing in the group.
        """
        engine, group_id = index % len(self._samplers), self._next_group + index
        samples = await self._samplers[engine].sample(GroupRequest(index, group_id, engine, prompt))
        group = Group(group_id, prompt, samples, engine=engine)
        return replace(group, failed=size - len(group.trajectories))

    def write_samples(self, groups: list[Group], path_of: Callable[[int], Path]) -> list[Group]:
        """Have the samplers write the arrays and texts of groups to files of a recording.

        Return the groups with the handles of the arrays in these files. Raises OSError if a file cannot be
        written.

        path_of: returns the path of a sampler's file. Its argument is the index of the sampler.
        """
        handles: dict[Sampler, list[RecordedHandles]] = {sampler: [] for sampler in self._samplers}
        paths = {sampler: path_of(index) for index, sampler in enumerate(handles)}
        recorded = []
        for group in groups:
            sampler = self._samplers[group.engine]
            file, first = str(paths[sampler]), len(handles[sampler])
            samples = (
                replace(sample, handle=RecordedArrays(file, first + index))
                for index, sample in enumerate(group.samples)
            )
            recorded.append(replace(group, samples=tuple(samples)))
            handles[sampler] += [(sample.handle, sample.texts) for sample in group.samples]

        async def write() -> list[OSError | None]:
            return await asyncio.gather(
                *(sampler.write_samples(paths[sampler], own) for sampler, own in handles.items() if own)
            )

        for error in asyncio.run(write()):
            if error is not None:
                raise error
        return recorded

    def state_dict(self) -> dict:
        """Return {"next_group": id of the next group}, for checkpoints."""
        return {"next_group": self._next_group}

    def load_state_dict(self, state: dict) -> None:
        self._next_group = state["next_group"]
