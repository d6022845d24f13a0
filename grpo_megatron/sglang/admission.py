"""Admission: keeps rounds of requests, weight updates and released memory of the engines apart."""

import itertools
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from enum import Enum

from grpo_megatron.cluster.rounds import RoundId
from grpo_megatron.errors import UserError


class Closed(Enum):
    """Reasons why the engines take no requests. The most important one is first."""

    stopped = "they have been stopped; start a new run"
    asleep = "they have released memory; resume it and sync the weights first"
    updating = "a weight update has begun and has not ended; wait for it, or start a new run if it has failed"
    unsynced = "their weights have not been compared with the trainer's; sync the weights first"


class Admission:
    """Admits rounds of requests to the engines, unless the engines are closed for one or several reasons.

    The engines are not closed for an update or a release of memory while a round is in progress, except for
    an update that the round allows. This object decides in one place and may be used by several threads, so
    that all engines are always in the same state.
    """

    def __init__(self, numbers: Iterator[int] | None = None):
        """Begin with engines that have just started: they are closed until their weights are synced.

        numbers: numbers for the rounds, which must increase. Another object for the same engines may use them
            too. None: from 1.
        """
        self.numbers = numbers or itertools.count(1)
        self._lock = threading.Lock()
        self._rounds: dict[str, RoundId] = {}  # in progress, by caller
        self._over_updates: set[str] = set()  # callers whose rounds go on while weights are updated
        self._closed = {Closed.unsynced}

    @contextmanager
    def round(self, caller: str, over_updates: bool = False) -> Iterator[RoundId]:
        """Admit a round of a caller, which is in progress within the context. Return its id.

        over_updates: True if weights may be updated during the round.

        Raises UserError if the engines are closed, or if the caller has a round in progress.
        """
        with self._lock:
            self._must_not_be(Closed, "generate")
            if caller in self._rounds:
                raise UserError(
                    f"a round of `{caller}` is in progress, and one caller cannot have two at a time; wait "
                    "until it has ended"
                )
            admitted = self._rounds[caller] = RoundId(caller, next(self.numbers))
            if over_updates:
                self._over_updates.add(caller)
        try:
            yield admitted
        finally:
            with self._lock:
                if self._rounds.get(caller) is admitted:  # not after `restart`
                    del self._rounds[caller]
                    self._over_updates.discard(caller)

    def must_be_open(self) -> None:
        """Raise UserError if the engines are closed."""
        with self._lock:
            self._must_not_be(Closed, "generate")

    def must_not_be_stopped(self, action: str) -> None:
        """Raise UserError if the engines have been stopped.

        action: what the caller wants to do, such as `resume memory`, for the message.
        """
        with self._lock:
            self._must_not_be([Closed.stopped], action)

    def _must_not_be(self, reasons: Iterable[Closed], action: str) -> None:
        for reason in reasons:
            if reason in self._closed:
                raise UserError(f"the engines cannot {action}: {reason.value}")

    def close(self, reason: Closed, action: str, within_rounds: bool = False) -> None:
        """Close the engines before an action that no round may see.

        action: what the caller wants to do, such as `release memory`, for messages.
        within_rounds: True if the action may take place during any round, because no engine has requests.

        Raises UserError if a round is in progress, or if the engines are stopped or closed by an update.
        """
        with self._lock:
            go_on = self._over_updates if reason == Closed.updating else set()
            blocking = [caller for caller in self._rounds if caller not in go_on]
            if blocking and not within_rounds:
                callers = " and ".join(f"`{caller}`" for caller in blocking)
                raise UserError(
                    f"the engines cannot {action} during a round of {callers}; wait until it has ended"
                )
            self._must_not_be([Closed.stopped, Closed.updating], action)
            self._closed |= {reason, Closed.unsynced}

    def open(self, *reasons: Closed) -> None:
        """Remove reasons. The engines take requests if no reason is left."""
        with self._lock:
            self._closed -= set(reasons)

    def stop(self) -> None:
        """Close the engines for good, even if a round is in progress."""
        with self._lock:
            self._closed.add(Closed.stopped)

    def restart(self) -> None:
        """Begin again after a failure, with engines that run no requests and whose weights are not synced."""
        with self._lock:
            self._rounds, self._over_updates, self._closed = {}, set(), {Closed.unsynced}
