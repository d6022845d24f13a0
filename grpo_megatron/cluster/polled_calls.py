"""PolledCalls: many calls to one Ray actor in few messages. rounds.RoundTasks is the actor's side."""

import asyncio
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import ray

from grpo_megatron.cluster.processes import Process, fetched
from grpo_megatron.cluster.rounds import TaskReport
from grpo_megatron.errors import ProcessLost, UserError

# Maximum seconds that one poll waits in the actor. It only determines how soon a deadlock is noticed.
POLL_SECONDS = 5.0


class Answer(Protocol):
    """Interface of the answer to a call that PolledCalls has made."""

    key: Any
    """Key of the call that this answers, as given to PolledCalls.call."""


class _Waiting(NamedTuple):
    """A call that has no answer yet.

    answer: future that receives the answer
    listener: function to call with each message that comes before the answer; None if there are no messages
    """

    answer: asyncio.Future
    listener: Callable[[Any], None] | None


class PolledCalls:
    """Calls to an actor that are sent in batches, and whose answers are polled for in batches.

    A Ray call takes much CPU time of the caller. So one Ray call carries all calls that are made until the
    event loop runs again, and one poll returns all answers that have arrived.
    """

    def __init__(
        self,
        process: Process,
        call: str,
        submit: Callable[[list], Any],
        poll: Callable[[float], ray.ObjectRef],
        timeout: float | None = None,
        timed_out: Callable[[int], str] | None = None,
    ):
        """Prepare calls to an actor. All calls of this object must be made in one event loop.

        process: name and log of the actor's process, for error messages.
        call: name of the calls, for error messages.
        submit: sends a list of items to the actor. Its result is not awaited: the poll reports errors.
        poll: asks the actor for everything since the last poll: one list of Answers and of TaskReports, which
            are messages from unfinished calls. The actor waits up to the given seconds for the first one, and
            raises the error of a call that failed. It answers None if it has ended the round (rounds.RoundId)
            that the calls belong to.
        timeout: seconds without any answer after which all calls fail. None: no limit.
        timed_out: returns the message of the error after `timeout`. Its argument is the number of calls that
            wait for an answer. It must be given together with `timeout`.
        """
        self._process, self._call, self._timeout, self._timed_out = process, call, timeout, timed_out
        self._submit, self._poll_once = submit, poll
        self._waiting: dict[Any, _Waiting] = {}  # by key
        self._unsent: list = []
        self._poller: asyncio.Task | None = None
        self._closed = False
        self._lost: ProcessLost | None = None

    async def call(self, key: Any, item: Any, listener: Callable[[Any], None] | None = None) -> Answer:
        """Send an item to the actor, and return the answer with this key.

        key: identifies the call. No other waiting call may have the same key.
        item: passed to `submit`, in a list with other items.
        listener: called with the value of each TaskReport (message from an unfinished call) with this key. If
            it is None, the actor must not send such messages.

        If any call of this object fails, its error is raised in all waiting calls. Raises ProcessLost if the
        actor has died, now or in an earlier call. Raises UserError after `timeout` seconds without any
        answer. Raises RuntimeError after `close`, or if the actor has ended the round (set of calls that end
        together).
        """
        if self._lost:
            raise self._lost
        if self._closed:
            raise RuntimeError(f"`{self._call}` was called after the end of its round")
        loop = asyncio.get_running_loop()
        answer = loop.create_future()
        self._waiting[key] = _Waiting(answer, listener)
        self._unsent.append(item)
        if len(self._unsent) == 1:
            loop.call_soon(self._send)  # it also sends the items that arrive until then
        try:
            return await answer
        finally:
            # After an error, further answers and reports for this key may arrive. They are ignored.
            self._waiting.pop(key, None)

    async def close(self) -> None:
        """Discard all calls and stop polling. Later calls raise RuntimeError.

        Before this method is called, all tasks that wait for an answer must be cancelled. They would wait
        forever.
        """
        self._closed = True
        self._waiting.clear()
        self._unsent = []
        if self._poller:
            self._poller.cancel()
            await asyncio.wait({self._poller})

    def _send(self) -> None:
        if not self._unsent:
            return  # closed meanwhile
        self._submit(self._unsent)
        self._unsent = []
        if self._poller is None or self._poller.done():
            self._poller = asyncio.create_task(self._poll())

    async def _poll(self) -> None:
        try:
            await self._answer_all()
        except Exception as error:  # passed on to every waiting caller
            self._lost = error if isinstance(error, ProcessLost) else None
            for waiting in self._waiting.values():
                if not waiting.answer.done():
                    waiting.answer.set_exception(error)

    async def _answer_all(self) -> None:
        clock = asyncio.get_running_loop().time
        last_progress = clock()
        while self._waiting:
            answers = await fetched(self._poll_once(POLL_SECONDS), self._process, self._call)
            if answers is None:
                raise RuntimeError(
                    f"{self._process.name} has ended the round of {len(self._waiting)} calls of "
                    f"`{self._call}` that still wait for their answers"
                )
            for answer in answers:
                waiting = self._waiting.get(answer.key)
                if isinstance(answer, TaskReport):
                    if waiting:
                        waiting.listener(answer.value)
                    continue
                last_progress = clock()
                if waiting and not waiting.answer.done():  # its caller may have been cancelled
                    waiting.answer.set_result(answer)
                    del self._waiting[answer.key]
            if self._waiting and self._timeout is not None and clock() - last_progress > self._timeout:
                raise UserError(self._timed_out(len(self._waiting)))
