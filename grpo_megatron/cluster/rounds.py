"""Rounds: sets of calls to an actor that end together, such as the calls that sample one step's groups.

Each round belongs to a caller, such as the training loop. An actor serves the rounds of several callers at
the same time, and keeps their tasks and answers apart.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from grpo_megatron.cluster.concurrency import cancel


class RoundId(NamedTuple):
    """Identifier of a round, which is a set of calls to an actor that end together.

    A caller has one round at a time. Its next round has a higher number.

    caller: name of the caller, such as `train`
    number: number of the round
    """

    caller: str
    number: int


class TaskReport(NamedTuple):
    """A message that a running task sends before its result. RoundTasks.poll returns it to the caller.

    key: key of the call that started the task
    value: content of the message
    """

    key: Any
    value: Any


@dataclass
class _Round:
    """State of a caller's newest round: its number, its running tasks, and the answers that `poll` returns.

    A round is a set of calls to an actor that end together. `tasks` also contains cancelled tasks of the
    caller's older rounds that have not ended yet.
    """

    number: int
    tasks: set[asyncio.Task]
    answers: asyncio.Queue = field(default_factory=asyncio.Queue)
    has_ended: bool = False


class RoundTasks:
    """The tasks that an actor runs for its callers, and their answers.

    Each caller has one round at a time, which is a set of calls that end together. A round begins with the
    first method call that names the round. At its beginning, the older round of the same caller ends, if it
    is still open.

    Ray may run the calls of an async actor in another order than they were made. So a call may arrive after
    the end of its round, or when the caller has a newer round already. Such calls are ignored, because their
    answers would appear in another round.
    """

    def __init__(self) -> None:
        self._newest: dict[str, _Round] = {}  # by caller

    @property
    def running(self) -> bool:
        """True if any task of this object is still running, for whichever caller."""
        return any(round.tasks for round in self._newest.values())

    def is_open(self, round: RoundId) -> bool:
        """Begin the round if it is new, and return True if it is open.

        A round is no longer open if it has ended, or if its caller has begun a newer round.
        """
        return self._opened(round) is not None

    def start(self, round: RoundId, work: Callable[[Any], Awaitable[Any]], items: Iterable[Any]) -> None:
        """Start a task `work(item)` for each item. `poll` returns the results.

        Nothing is started if the round has ended, or if its caller has a newer round.
        """
        opened = self._opened(round)
        for item in items if opened else ():
            task = asyncio.create_task(_answer(work, item, opened.answers))
            opened.tasks.add(task)
            task.add_done_callback(opened.tasks.discard)

    def report(self, round: RoundId, report: TaskReport) -> None:
        """Pass on a message from a running task, which `poll` returns to the round's caller.

        Nothing is done if the round has ended, or if its caller has a newer round.
        """
        if opened := self._opened(round):
            opened.answers.put_nowait(report)

    async def poll(self, round: RoundId, seconds: float, linger: float = 0.0) -> list[Any] | None:
        """Return the results and reports of the round's tasks since the last poll, in order of arrival.

        The list is empty if nothing arrives in time. The result is None if the round has ended, or if its
        caller has a newer round. If a task has failed, the task's error is raised, and all results that
        arrived with it are dropped.

        seconds: maximum time to wait for the first result or report.
        linger: seconds to wait for further results and reports after the first one.
        """
        opened = self._opened(round)
        if opened is None:
            return None
        try:
            found = [await asyncio.wait_for(opened.answers.get(), seconds)]
        except asyncio.TimeoutError:
            return []
        if linger:
            await asyncio.sleep(linger)
        while not opened.answers.empty():
            found.append(opened.answers.get_nowait())
        for answer in found:
            if isinstance(answer, Exception):
                raise answer
        return found

    async def end(self, round: RoundId) -> None:
        """End a round: cancel its tasks, wait until they have ended, and discard results not yet polled.

        A second call for the same round waits too. A call for a round that has not begun marks it as ended,
        so later calls for it are ignored. Nothing happens if the round's caller already has a newer round.
        """
        self._opened(round)  # from now on, the round is known
        newest = self._newest[round.caller]
        if newest.number != round.number:
            return
        newest.has_ended, newest.answers = True, asyncio.Queue()
        cancel(newest.tasks)
        if newest.tasks:
            await asyncio.wait(newest.tasks)

    async def end_all(self) -> None:
        """End the newest round of each caller, and wait until all tasks have ended."""
        newest = [RoundId(caller, round.number) for caller, round in self._newest.items()]
        await asyncio.gather(*map(self.end, newest))

    def _opened(self, round: RoundId) -> _Round | None:
        """Return the state of a round, or None if it has ended or its caller has a newer round.

        If the round is new, it begins, and the tasks of the caller's older round are cancelled.
        """
        newest = self._newest.get(round.caller)
        if newest is None or newest.number < round.number:
            running = newest.tasks if newest else set()
            cancel(running)
            # Cancelled tasks may still need time to end, so they stay in the set.
            newest = self._newest[round.caller] = _Round(round.number, running)
        return None if newest.has_ended or newest.number > round.number else newest


async def _answer(work: Callable[[Any], Awaitable[Any]], item: Any, answers: asyncio.Queue) -> None:
    try:
        answers.put_nowait(await work(item))
    except Exception as error:  # poll raises it in the caller's process
        answers.put_nowait(error)
