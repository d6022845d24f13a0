"""Admission: keeps rounds of requests, weight updates and released memory of the engines apart."""

import itertools
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from enum import Enum

from grpo_megatron.cluster.rounds import RoundId
from grpo_megatron.errors import UserError


class Closed(Enum):
    """Reasons why the engines take no requests. If several apply, error messages name the first one."""

    stopped = "they have been stopped; start a new run"
    asleep = "they have released memory; resume it and sync the weights first"
    updating = "a weight update has begun and has not ended; wait for it, or start a new run if it has failed"
    unsynced = "their weights have not been compared with the trainer's; sync the weights first"


class Admission:
    """Admits rounds of requests to the engines, unless the engines are closed for one or several reasons.

    A round (cluster.rounds) is a batch of requests of one caller, such as the training loop. During a round,
    the engines cannot be closed for a release of memory, nor for a weight update unless the round allows it.
    One object decides for all engines of a run, so that all are in the same state. Several threads may use
    the object at the same time.
    """

    def __init__(self, numbers: Iterator[int] | None = None):
        """Begin with engines that have just started: they are closed until their weights are synced.

        numbers: iterator that numbers the rounds, in increasing order. It may be shared with another object
            for the same engines. None: 1, 2, 3 and so on.
        """
        self.numbers = numbers or itertools.count(1)
        self._lock = threading.Lock()
        self._rounds: dict[str, RoundId] = {}  # in progress, by caller
        self._over_updates: set[str] = set()  # callers whose rounds go on while weights are updated
        self._closed = {Closed.unsynced}

    @contextmanager
    def round(self, caller: str, over_updates: bool = False) -> Iterator[RoundId]:
        """Admit a round of requests, which is in progress until the end of the `with` block. Yield its id.

        caller: name of the caller, such as `train`.
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
                if self._rounds.get(caller) is admitted:  # `restart` may have ended the round
                    del self._rounds[caller]
                    self._over_updates.discard(caller)

    @property
    def updating(self) -> bool:
        """True if a weight update is in progress."""
        return Closed.updating in self._closed

    def must_be_open(self) -> None:
        """Raise UserError if the engines are closed (take no requests), such as during a weight update."""
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
        """Close the engines for a reason, before an action that must not take place while requests run.

        The weights then count as unsynced too (Closed.unsynced), until `open` is called with this reason.

        action: what the caller wants to do, such as `release memory`, for messages.
        within_rounds: True if the action may take place during any round, because no engine has requests.

        Raises UserError if the engines have been stopped, or if a weight update is in progress. Raises
        UserError also if a round is in progress, unless `within_rounds` is True, or `reason` is
        Closed.updating and all rounds in progress allow updates.
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
        """Remove reasons why the engines are closed. The engines take requests if no reason is left."""
        with self._lock:
            self._closed -= set(reasons)

    def stop(self) -> None:
        """Close the engines for good, even if a round is in progress: they take no requests any more."""
        with self._lock:
            self._closed.add(Closed.stopped)

    def restart(self) -> None:
        """Begin again after a failure: forget all rounds. The engines are closed until a weight sync."""
        with self._lock:
            self._rounds, self._over_updates, self._closed = {}, set(), {Closed.unsynced}
