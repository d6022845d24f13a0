"""GroupRound: a round in progress, whose groups are sampled concurrently and have all ended when it ends."""

import asyncio
import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from grpo_megatron.batch.prompt import Prompt
from grpo_megatron.batch.sample import Group, Sample
from grpo_megatron.cluster.concurrency import all_ended, cancel, together
from grpo_megatron.cluster.rounds import RoundId
from grpo_megatron.errors import ProcessLost
from grpo_megatron.rollout.engine_loads import EngineLoads, GroupWork, WorkReport
from grpo_megatron.rollout.groups import EngineLost, GroupRequest, Round
from grpo_megatron.rollout.recording.arrays import RecordedHandles
from grpo_megatron.sglang.held import HeldEngines
from grpo_megatron.sglang.pool import EnginePool

logger = logging.getLogger(__name__)

# Maximum seconds that a round which has failed may take to end. Its engines or workers may be the cause.
_END_SECONDS = 60.0
# Number of engines that may die while they sample a group. The group may be the cause.
_MOST_LOSSES = 2
# Maximum seconds until groups that wait for room notice an engine that has joined.
_LOOK_SECONDS = 1.0
# Maximum seconds until they notice the end of a weight update.
_UPDATE_SECONDS = 0.05


class Sampler(Protocol):
    """Interface of an object that samples groups for rounds.

    RolloutWorker, the handle of a process with a GroupSampler, implements it.
    """

    async def begin(self, round: Round) -> None: ...

    async def sample(
        self, round: RoundId, request: GroupRequest, listener: Callable[[WorkReport], None]
    ) -> tuple[Sample, ...]: ...

    async def end(self, round: RoundId) -> None: ...

    async def write_samples(self, path: Path, handles: Sequence[RecordedHandles]) -> OSError | None: ...


class GroupRound:
    """A round in progress, for `async with`: groups that are sampled concurrently and that end together.

    At the beginning of the context, all samplers begin the round. Within it, groups can be started at any
    time. At the end of the context, the tasks of the groups are cancelled, the engines end the round's
    requests, and answers that come later are dropped. After an error or Ctrl-C, this takes at most 60
    seconds, and further errors are only logged.

    id: caller and number of the round
    """

    def __init__(
        self,
        round: Round,
        engines: EnginePool | HeldEngines,
        samplers: Sequence[Sampler],
        limits: dict[int, int],
        outlives_engines: bool = False,
    ):
        """Create a round without groups, which has not begun.

        round: the settings of the round.
        samplers: for each engine, the sampler that sends requests to it. Engines may share a sampler.
        limits: the attribute `limits` of EngineLoads.
        outlives_engines: True if groups wait until an engine serves again after all engines have been lost.
            False: the groups fail.
        """
        self.id, self._round, self._rollout = round.id, round, round.rollout
        self._engines, self._outlives_engines = engines, outlives_engines
        # If an engine joins during the round, `samplers` grows. So it is not copied.
        self._samplers, self._different = samplers, set(samplers)
        self._tasks: set[asyncio.Task[Group]] = set()
        self._keys, self._loads = itertools.count(), EngineLoads(self._rollout.max_concurrency, limits)
        self._turn, self._changed = asyncio.Lock(), asyncio.Event()
        self._loss: EngineLost | None = None  # the newest loss of an engine that a group has met

    async def __aenter__(self) -> "GroupRound":
        try:
            await together(sampler.begin(self._round) for sampler in self._different)
        except BaseException:
            await self._end_after_failure()
            raise
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_) -> None:
        if kind is not None:
            await self._end_after_failure()
            return
        try:
            await self._end()
        except asyncio.CancelledError:  # Ctrl-C while the round ended
            await self._end_after_failure()
            raise

    def start(self, prompt: Prompt, group_id: int) -> asyncio.Task[Group]:
        """Start to sample a group on the engine with the fewest outstanding tokens. Return the task.

        If no engine has room, the group first waits until one has. Groups get engines in the order in which
        this method was called for them.

        The result of the task is the group with its scored samples. If the engine dies, the group goes on
        with another one. If a third engine dies with the group, the task fails, because the group may be the
        cause. With reward.on_failure=leave_out, failed samples are missing in the group. If the task still
        runs when the round ends, it is cancelled.
        """
        task = asyncio.create_task(self._sample(prompt, group_id))
        self._tasks.add(task)
        task.add_done_callback(self._forget)
        return task

    def _forget(self, task: asyncio.Task) -> None:
        """Drop the reference to a task that has ended, so that a long round does not keep all its tasks.

        The task's error is retrieved, so that asyncio does not log it.
        """
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()

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
            return await sampler.sample(self.id, request, note)
        finally:
            self._loads.end(request.key)
            self._changed.set()

    async def _end(self) -> None:
        cancel(self._tasks)
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await all_ended(sampler.end(self.id) for sampler in self._different)

    async def _end_after_failure(self) -> None:
        """End the round after an error. Further errors are logged, and do not hide the first one.

        This takes at most _END_SECONDS.
        """
        try:
            await asyncio.wait_for(self._end(), _END_SECONDS)
        except Exception as error:
            logger.debug(f"{self.id} did not end properly: {error}", exc_info=True)
