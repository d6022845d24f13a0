"""A round in progress: groups that are sampled concurrently, and that all have ended when the round ends."""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

from grpo_megatron.batch.sample import Sample
from grpo_megatron.cluster.concurrency import all_ended, cancel, together
from grpo_megatron.cluster.rounds import RoundId
from grpo_megatron.rollout.engine_loads import WorkReport
from grpo_megatron.rollout.groups import GroupRequest, Round
from grpo_megatron.rollout.recording.arrays import RecordedHandles

logger = logging.getLogger(__name__)
T = TypeVar("T")

# Maximum seconds that a round which has failed may take to end. Its engines or workers may be the cause.
_END_SECONDS = 60.0


class Sampler(Protocol):
    """Interface of an object that samples groups for rounds.

    The object is a GroupSampler in this process, or a RolloutWorker: the handle of a GroupSampler in another
    process.
    """

    async def begin(self, round: Round) -> None: ...

    async def sample(
        self, round: RoundId, request: GroupRequest, listener: Callable[[WorkReport], None]
    ) -> tuple[Sample, ...]: ...

    async def end(self, round: RoundId) -> None: ...

    async def write_samples(self, path: Path, handles: Sequence[RecordedHandles]) -> OSError | None: ...


class OpenRound:
    """A round in progress, for `async with`: groups that are sampled concurrently and that end together.

    At the beginning of the context, all samplers begin the round. At the end of the context, the round's
    tasks are cancelled, the engines end the round's requests, and answers that come later are dropped. After
    an error or Ctrl-C, this takes at most 60 seconds, and further errors are only logged.

    id: caller and number of the round
    """

    def __init__(self, round: Round, samplers: Iterable[Sampler]):
        self.id, self._round, self._samplers = round.id, round, list(samplers)
        self._tasks: set[asyncio.Task] = set()

    async def __aenter__(self) -> "OpenRound":
        try:
            await together(sampler.begin(self._round) for sampler in self._samplers)
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

    def start(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Start a task, and return it. If the task still runs when the round ends, it is cancelled.

        work: coroutine that the task runs.
        """
        task = asyncio.create_task(work)
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

    async def _end(self) -> None:
        cancel(self._tasks)
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await all_ended(sampler.end(self.id) for sampler in self._samplers)

    async def _end_after_failure(self) -> None:
        """End the round after an error. Further errors are logged, and do not hide the first one.

        This takes at most _END_SECONDS.
        """
        try:
            await asyncio.wait_for(self._end(), _END_SECONDS)
        except Exception as error:
            logger.debug(f"{self.id} did not end properly: {error}", exc_info=True)
