"""PlayedGroup: a group that moves to another engine if its engine is lost."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from grpo_megatron.batch.sample import Sample
from grpo_megatron.cluster.concurrency import cancel
from grpo_megatron.rollout.engine_loads import GroupWork, WorkReport

# Function that gets a report on the work that an engine has left with a group.
Listener = Callable[[WorkReport], None]


class PlayedGroup:
    """The task that plays the episodes of a group. Its requests go to one engine at a time.

    If the engine is lost, the episodes wait until they can go on with another one.

    engine: index of the engine that gets the requests
    listener: gets a report when the engine's work with the group changes
    moves: number of engines that had the group before; -1 before the first call of `run_on`
    """

    def __init__(self, play: Callable[["PlayedGroup"], Coroutine[Any, Any, tuple[Sample, ...]]]):
        """Prepare the task that plays the episodes of a group. `run_on` starts the task.

        play: async function that plays the episodes. It gets this object, and sends its requests to the
            engine that this object's attribute `engine` names. If a request fails because the engine is lost,
            the function must await the method `moved`, which waits for another engine, and then repeat the
            request.
        """
        self._play = play
        self._task: asyncio.Task[tuple[Sample, ...]] | None = None
        self._changed = asyncio.Event()  # set when the engine has changed
        self._noted = asyncio.Event()  # when the engine is lost, or the episodes have ended
        self._error: Exception | None = None
        self.engine, self.moves = 0, -1
        self.listener: Listener | None = None
        self._left: dict[int, int] = {}  # tokens of each sample's request to the engine

    async def run_on(self, engine: int, listener: Listener) -> tuple[Sample, ...]:
        """Play the episodes, or continue them, with requests to an engine. Return their samples.

        If the engine is lost, the episodes report this by calling `moved` with an error, and this method
        raises the error. The episodes then wait until this method is called with another engine, or until
        `end` is called. If this call is cancelled, the episodes are cancelled too. If the episodes fail, this
        method raises their error.

        engine: index of the engine.
        listener: gets a report when the engine's work with the group changes.
        """
        self.engine, self.moves, self.listener = engine, self.moves + 1, listener
        self._noted.clear()
        self._changed.set()
        self._changed = asyncio.Event()
        if self._task:
            self._report()
        else:
            self._task = asyncio.create_task(self._play(self))
            self._task.add_done_callback(lambda _: self._noted.set())
        try:
            if not self._task.done():
                await self._noted.wait()
        except asyncio.CancelledError:
            await self.end()
            raise
        if self._task.done():
            return self._task.result()
        raise self._error

    async def moved(self, moves: int, error: Exception) -> None:
        """Report that the group's engine is lost, and wait until the group has another engine.

        The episodes call this method when a request has failed. It returns at once if the group has got
        another engine since the request was sent.

        moves: value of the attribute `moves`, which counts the changes of engines, when the request was sent.
        error: error that the present call of `run_on` raises to its caller.
        """
        if moves == self.moves:
            self._error = error
            self._noted.set()
            await self._changed.wait()

    def expect(self, samples: int, tokens: int) -> None:
        """Note that the engine soon gets a request for each sample of the group.

        samples: number of samples.
        tokens: maximum number of tokens that the engine reads and samples for each of these requests.
        """
        self._left = dict.fromkeys(range(samples), tokens)

    def asks(self, member: int, tokens: int, limit: int) -> None:
        """Note that the engine gets a request for a sample. If it was not expected, tell the listener.

        member: index of the sample in the group.
        tokens: maximum number of tokens that the engine reads and samples for the request.
        limit: WorkReport.limit.
        """
        was_expected = member in self._left
        self._left[member] = tokens
        if not was_expected:
            self._report(limit)

    def answered(self, member: int, limit: int) -> None:
        """Note that the request for a sample has ended, and tell the listener.

        The sample then waits for its reward or its environment, and not for the engine.

        member: index of the sample in the group.
        limit: WorkReport.limit.
        """
        if self._left.pop(member, None):
            self._report(limit)

    def _report(self, limit: int = 0) -> None:
        self.listener(WorkReport(GroupWork(len(self._left), sum(self._left.values())), limit))

    async def end(self) -> None:
        """Cancel the episodes, and wait until they have ended."""
        cancel([self._task])
        await asyncio.gather(self._task, return_exceptions=True)
