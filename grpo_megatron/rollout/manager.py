"""RolloutManager: generates groups of scored samples from prompts."""

import asyncio
import itertools
import threading
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

from grpo_megatron.batch.prompt import Prompt
from grpo_megatron.batch.sample import Group, Sample
from grpo_megatron.cluster.concurrency import together
from grpo_megatron.config.rollout import RolloutConfig
from grpo_megatron.errors import ProcessLost
from grpo_megatron.rollout.engine_loads import EngineLoads, GroupWork, WorkReport
from grpo_megatron.rollout.groups import Caller, EngineLost, GroupRequest, Round
from grpo_megatron.rollout.open_round import OpenRound, Sampler
from grpo_megatron.rollout.recording.arrays import RecordedArrays, RecordedHandles
from grpo_megatron.sglang.admission import Admission

T = TypeVar("T")

# Number of engines that may die while they sample a group. The group may be the cause.
_MOST_LOSSES = 2
# Maximum seconds until groups that wait for room notice an engine that has joined.
_LOOK_SECONDS = 1.0
# Maximum seconds until they notice the end of a weight update.
_UPDATE_SECONDS = 0.05


class Engines(Protocol):
    """Interface of the rollout engines, as far as RolloutManager uses it. EnginePool implements it.

    admission: admits rounds of requests, unless the engines are closed, such as for a weight update
    weight_version: version of the weights that the engines serve
    end_ids: ids of the tokens that end a response
    serving: {index: number of starts} of the engines that get requests
    """

    admission: Admission
    weight_version: int
    end_ids: frozenset[int]
    serving: Mapping[int, int]

    def lost(self, index: int, starts: int, error: ProcessLost) -> None: ...

    async def next_serving(self) -> Mapping[int, int]: ...


class GroupRound:
    """A round in progress: groups that are sampled concurrently. More groups can be started at any time."""

    def __init__(
        self,
        opened: OpenRound,
        engines: Engines,
        samplers: Sequence[Sampler],
        rollout: RolloutConfig,
        limits: dict[int, int],
        outlives_engines: bool = False,
    ):
        """Create a round in progress, without groups.

        opened: runs the tasks of the round. All samplers must have begun the round.
        samplers: for each engine, the sampler that sends requests to it.
        rollout: settings of the sampling.
        limits: the attribute `limits` of EngineLoads.
        outlives_engines: True if groups wait until an engine serves again after all engines have been lost.
            False: the groups fail.
        """
        self._outlives_engines = outlives_engines
        self._opened, self._engines, self._samplers, self._rollout = opened, engines, samplers, rollout
        self._keys, self._loads = itertools.count(), EngineLoads(rollout.max_concurrency, limits)
        self._turn, self._changed = asyncio.Lock(), asyncio.Event()
        self._loss: EngineLost | None = None  # the newest loss of an engine that a group has met

    def start(self, prompt: Prompt, group_id: int) -> asyncio.Task[Group]:
        """Start to sample a group on the engine with the fewest outstanding tokens. Return the task.

        If no engine has room, the group first waits until one has. Groups get engines in the order in which
        this method was called for them.

        The result of the task is the group with its scored samples. If the engine dies, the group goes on
        with another one. If a third engine dies with the group, the task fails, because the group may be the
        cause. With reward.on_failure=leave_out, failed samples are missing in the group. If the task still
        runs when the round ends, it is cancelled.
        """
        return self._opened.start(self._sample(prompt, group_id))

    async def _sample(self, prompt: Prompt, group_id: int) -> Group:
        losses, first = 0, None
        tokens = len(prompt.ids) + self._rollout.max_response_length
        work = GroupWork(self._rollout.n, self._rollout.n * tokens)
        while True:
            key = next(self._keys)
            engine, starts = await self._assign(key, work, has_begun=losses > 0)
            # The sampler of the first engine has the group's episodes.
            first = engine if first is None else first
            try:
                request = GroupRequest(key, group_id, engine, prompt, self._engines.weight_version)
                samples = await self._sample_on(self._samplers[first], request)
                break
            except EngineLost as error:
                losses, self._loss = losses + 1, error
                if losses > _MOST_LOSSES:
                    raise
                self._engines.lost(engine, starts, error)
                if not (self._engines.serving or self._outlives_engines):
                    raise
        group = Group(group_id, prompt, samples, engine=first)
        return replace(group, failed=self._rollout.n - len(group.trajectories))

    async def _serving(self) -> Mapping[int, int]:
        """Return {index: number of starts} of the engines that serve, at least one.

        If no engine serves, this method waits for one, provided that the round outlives its engines
        (`outlives_engines`). Otherwise it raises the newest loss that a group has met, or ProcessLost.
        """
        serving = self._engines.serving
        if not serving and not self._outlives_engines:
            raise self._loss or ProcessLost("all engines are lost, and none has come back yet")
        return serving or await self._engines.next_serving()

    async def _assign(self, key: int, work: GroupWork, has_begun: bool) -> tuple[int, int]:
        """Choose the engine for a request, and note its work. Return (index of the engine, number of starts).

        key: GroupRequest.key of the request.
        has_begun: True if the group has lost its engine. It then gets an engine even if none has room.
        """
        if has_begun:
            serving = await self._serving()
            engine = self._loads.least(serving)
            self._loads.start(engine, key, work)
            return engine, serving[engine]
        async with self._turn:
            while True:
                serving, updating = await self._serving(), self._engines.admission.updating
                engine = None if updating else self._loads.best(serving)
                if engine is not None:
                    self._loads.start(engine, key, work)
                    return engine, serving[engine]
                self._changed.clear()
                # Nothing else sets the event when an update ends, or an engine joins or comes back. Neither
                # wait_for nor timeout is used: both may swallow a cancellation that comes at the same time.
                seconds = _UPDATE_SECONDS if updating else _LOOK_SECONDS
                again = asyncio.get_running_loop().call_later(seconds, self._changed.set)
                try:
                    await self._changed.wait()
                finally:
                    again.cancel()

    async def _sample_on(self, sampler: Sampler, request: GroupRequest) -> tuple[Sample, ...]:
        is_own = sampler is self._samplers[request.engine]

        def note(report: WorkReport) -> None:
            # A group that has moved reports the limit of another worker's few requests to the engine.
            self._loads.report(request.key, report if is_own else report._replace(limit=0))
            self._changed.set()

        try:
            return await sampler.sample(self._opened.id, request, note)
        finally:
            self._loads.end(request.key)
            self._changed.set()


class RolloutManager:
    """Generates samples on all engines concurrently, scores them, and groups them by prompt.

    Groups are sampled in rounds. A round is a set of groups that are sampled concurrently. When it has ended,
    no worker or engine works on its groups any more. Several threads may use a manager at the same time, each
    for another purpose (Caller), such as training and evaluation.
    """

    def __init__(self, engines: Engines, samplers: Sequence[Sampler]):
        """Create a manager, which numbers its groups from 0.

        engines: the engines that generate the turns of the model.
        samplers: for each engine, the sampler that sends requests to it. Engines of one node share a sampler.
        """
        self._engines, self._samplers = engines, samplers
        self._next_group, self._lock = 0, threading.Lock()
        # For each caller, the attribute `limits` of its EngineLoads.
        self._limits: defaultdict[Caller, dict[int, int]] = defaultdict(dict)
        # The calls of `generate` in progress.
        self._calls: dict[asyncio.Task, asyncio.AbstractEventLoop] = {}
        self._is_aborted = False

    @property
    def num_serving(self) -> int:
        """Number of engines that get requests."""
        return len(self._engines.serving)

    def generate(
        self, prompts: list[Prompt], rollout: RolloutConfig, caller: Caller = Caller.train
    ) -> list[Group]:
        """Generate and score `rollout.n` samples for each prompt. Return groups in the order of the prompts.

        rollout: settings such as the number of samples and the temperature.
        caller: what the samples are for. In evaluations, an environment's initial state depends only on the
            prompt, so that evaluations at different steps are comparable.

        With reward.on_failure=leave_out, failed samples are left out of their group, which may become empty.

        Raises ProcessLost, a UserError, if the last engine dies, or if a third engine dies with the same
        group. Raises UserError if an engine finishes no request for rollout.engine.request_timeout seconds,
        if the engines cannot generate now, for example because their weights are being updated, or if
        `caller` has a round in progress. Raises the errors of rewards and environments. Raises CancelledError
        after `abort`.
        """

        async def sampled() -> list[Group]:
            task = asyncio.current_task()
            with self._lock:
                if self._is_aborted:
                    raise asyncio.CancelledError
                self._calls[task] = asyncio.get_running_loop()
            try:
                async with self.round(caller, rollout) as round:
                    ids = self.take_ids(len(prompts))
                    return await together(map(round.start, prompts, ids))
            finally:
                with self._lock:
                    del self._calls[task]

        return _run(sampled())

    def abort(self) -> None:
        """Cancel the calls of `generate` in other threads.

        The cancelled calls, and all later calls of `generate`, raise CancelledError.
        """
        with self._lock:
            self._is_aborted = True
            for task, loop in self._calls.items():
                loop.call_soon_threadsafe(task.cancel)

    @asynccontextmanager
    async def round(
        self,
        caller: Caller,
        rollout: RolloutConfig,
        over_updates: bool = False,
        outlives_engines: bool = False,
    ) -> AsyncIterator[GroupRound]:
        """Open a round, in which groups are sampled concurrently, and yield it. The context ends the round.

        When the context has ended, no worker or engine works on the round's groups any more.

        caller: what the samples are for.
        rollout: settings of the sampling.
        over_updates: True to allow weight updates during the round.
        outlives_engines: True if groups wait until an engine serves again after all engines have been lost.
            Another thread has to sync the weights meanwhile. False: the loss of all engines is an error.

        Raises UserError if the engines cannot generate now, for example because their weights are being
        updated, or if `caller` has a round in progress.
        """
        engines = self._engines
        with engines.admission.round(caller.value, over_updates) as id:
            # After the loss of all engines, the update that makes one serve again is within the round.
            round = Round(id, rollout, engines.end_ids, over_updates or outlives_engines)
            async with OpenRound(round, set(self._samplers)) as opened:
                limits = self._limits[caller]
                yield GroupRound(opened, engines, self._samplers, rollout, limits, outlives_engines)

    def write_samples(self, groups: list[Group], path_of: Callable[[int], Path]) -> list[Group]:
        """Have the samplers write the arrays and texts of groups to files of a recording.

        Return copies of the groups, in which the handle of each sample's arrays refers to these files. Raises
        OSError if a file cannot be written.

        path_of: function that returns the path of a sampler's file. Its argument is the sampler's index.
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

        for error in _run(write()):
            if error is not None:
                raise error
        return recorded

    def take_ids(self, count: int) -> range:
        """Reserve `count` consecutive ids for groups, and return them. Each id is returned only once."""
        with self._lock:
            first = self._next_group
            self._next_group += count
        return range(first, first + count)

    def state_dict(self) -> dict:
        """Return {"next_group": id of the next group}, for checkpoints."""
        return {"next_group": self._next_group}

    def load_state_dict(self, state: dict) -> None:
        self._next_group = state["next_group"]


def _run(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine in a new event loop, and return its result.

    asyncio.run formats the result of the coroutine that it gets as text. This takes milliseconds for some
    hundred samples. So asyncio.run gets a coroutine that returns nothing, and the result is stored elsewhere.
    """
    results = []

    async def main() -> None:
        results.append(await coroutine)

    asyncio.run(main())
    return results[0]
