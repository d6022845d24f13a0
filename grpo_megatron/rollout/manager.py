"""RolloutManager: generates groups of scored samples from prompts."""

import asyncio
import math
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

from grpo_megatron.batch.prompt import Prompt
from grpo_megatron.batch.sample import Group
from grpo_megatron.cluster.concurrency import together
from grpo_megatron.cluster.rounds import RoundId
from grpo_megatron.config.rollout import RolloutConfig
from grpo_megatron.rollout.groups import Caller, GroupRequest, Round
from grpo_megatron.rollout.open_round import OpenRound, Sampler
from grpo_megatron.rollout.recording.arrays import RecordedArrays, RecordedHandles
from grpo_megatron.sglang.admission import Admission

T = TypeVar("T")


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


class Engines(Protocol):
    """The part of EnginePool that RolloutManager uses."""

    admission: Admission
    weight_version: int
    end_ids: frozenset[int]


class RolloutManager:
    """Generates samples on all engines concurrently, scores them, and groups them by prompt.

    Each call of `generate` or `fill` is a round, which has ended in every respect when the call ends. Several
    threads may call a manager at a time, each for another caller (rollout.groups.Caller).
    """

    def __init__(self, engines: Engines, samplers: Sequence[Sampler]):
        """Create a manager, which numbers its groups from 0.

        engines: the engines that generate the turns of the model.
        samplers: for each engine, the sampler that sends requests to it. Engines of one node share a sampler.
        """
        self._engines, self._samplers = engines, samplers
        self._next_group, self._lock = 0, threading.Lock()
        self._running: dict[asyncio.Task, asyncio.AbstractEventLoop] = {}
        self._is_cancelled = False

    def generate(
        self, prompts: list[Prompt], rollout: RolloutConfig, caller: Caller = Caller.train
    ) -> list[Group]:
        """Generate and score `rollout.n` samples for each prompt. Return groups in the order of the prompts.

        rollout: settings such as the number of samples and the temperature.
        caller: what the samples are for. In evaluations, an environment's initial state depends only on the
            prompt, so that evaluations at different steps are comparable.

        With reward.on_failure=leave_out, failed samples are left out of their group, which may become empty.

        Raises UserError if an engine dies, or finishes no request for rollout.engine.request_timeout seconds.
        Raises UserError also if the engines cannot generate now, because their weights are being updated, for
        example, or if the caller has a round in progress. Raises the errors of rewards and environments.
        """
        return self._run(self._generate(prompts, rollout, caller))

    async def _generate(self, prompts: list[Prompt], rollout: RolloutConfig, caller: Caller) -> list[Group]:
        async with self._round(caller, rollout) as this:
            first = self._take_ids(len(prompts))
            return await together(
                this.start(self._group(this.id, prompt, index, first + index, rollout.n))
                for index, prompt in enumerate(prompts)
            )

    @asynccontextmanager
    async def _round(self, caller: Caller, rollout: RolloutConfig) -> AsyncIterator[OpenRound]:
        engines = self._engines
        with engines.admission.round(caller.value) as id:
            round = Round(id, rollout, engines.weight_version, engines.end_ids)
            async with OpenRound(round, set(self._samplers)) as opened:
                yield opened

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

        Raises the same errors as `generate`.
        """
        return self._run(self._fill(draw, keep, rollout, goal))

    async def _fill(self, draw, keep, rollout: RolloutConfig, goal: Goal) -> Filled:
        filled, asked = Filled(), 0
        running: dict[asyncio.Task[Group], Group] = {}  # to a group that has no samples yet
        async with self._round(Caller.train, rollout) as this:
            while len(filled.groups) < goal.groups:
                wanted = math.ceil((goal.groups - len(filled.groups)) * goal.in_flight) - len(running)
                for prompt in draw(min(max(wanted, 0), goal.most - asked)):
                    group_id = self._take_ids(1)
                    task = this.start(self._group(this.id, prompt, asked, group_id, rollout.n))
                    running[task] = Group(group_id, prompt, ())
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
        filled.aborted += running.values()
        filled.groups.sort(key=lambda group: group.group_id)
        return filled

    async def _group(self, round: RoundId, prompt: Prompt, index: int, group_id: int, size: int) -> Group:
        """Return a sampled group.

        index: index of the group within the round. It also selects the engine.
        size: number of samples that are drawn. Those whose reward failed may be missing in the group.
        """
        engine = index % len(self._samplers)
        samples = await self._samplers[engine].sample(round, GroupRequest(index, group_id, engine, prompt))
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

        for error in self._run(write()):
            if error is not None:
                raise error
        return recorded

    def _take_ids(self, count: int) -> int:
        """Reserve ids for the next groups, and return the first. Rounds at the same time get other ids."""
        with self._lock:
            first = self._next_group
            self._next_group += count
        return first

    def cancel(self) -> None:
        """End all calls of the other methods, in other threads, by an asyncio.CancelledError.

        Later calls end in this way, too. The rounds of the calls end as after other errors.
        """
        with self._lock:
            self._is_cancelled = True
            for task, loop in self._running.items():
                loop.call_soon_threadsafe(task.cancel)

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in a new event loop, and return its result.

        asyncio.run would format the coroutine's result as text when it compares signal handlers at its end.
        This takes milliseconds for some hundred samples. So the task that it sees returns nothing.
        """
        results = []

        async def main() -> None:
            task = asyncio.current_task()
            with self._lock:
                self._running[task] = asyncio.get_running_loop()
                if self._is_cancelled:
                    task.cancel()
            try:
                results.append(await coroutine)
            finally:
                with self._lock:
                    del self._running[task]

        asyncio.run(main())
        return results[0]

    def state_dict(self) -> dict:
        """Return {"next_group": id of the next group}, for checkpoints."""
        return {"next_group": self._next_group}

    def load_state_dict(self, state: dict) -> None:
        self._next_group = state["next_group"]
