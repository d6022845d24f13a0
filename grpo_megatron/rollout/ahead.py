"""Sampling of batches in a thread, ahead of the training steps that they are for."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

T = TypeVar("T")


class SampledAhead(Generic[T]):
    """Samples the batches of training steps in order, one at a time, in a thread of its own.

    The number of batches in flight is bounded by counting: batch k + ahead begins when batch k is taken, and
    not before. So no sample can be older than `ahead` weight updates when it is trained, and none has to be
    discarded.
    """

    def __init__(self, sample: Callable[[int], T], ahead: int, last: int, cancel: Callable[[], None]):
        """Create it without a thread. The first `take` starts the thread.

        sample: returns the batch of a step. It runs in the thread.
        ahead: largest number of batches that are begun before the batch of the current step is trained.
        last: last step that a batch is sampled for.
        cancel: makes a call of `sample` that is in progress end soon.
        """
        self._sample, self._ahead, self._last, self._cancel = sample, ahead, last, cancel
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._results: dict[int, T] = {}
        self._error: BaseException | None = None
        self._next = self._limit = 0  # the next step to sample, and the last one that may begin
        self._pauses, self._is_sampling, self._is_closed = 0, False, False
        self._busy, self._since = 0.0, 0.0

    def take(self, step: int) -> T:
        """Wait for the batch of a step, and return it. Steps must be taken in order, without gaps.

        Raises the error that ended the sampling, if there was one.
        """
        with self._changed:
            if self._thread is None:
                self._next = step
                self._thread = threading.Thread(target=self._run, name="sampling ahead", daemon=True)
                self._thread.start()
            self._limit = min(step + self._ahead, self._last)
            self._changed.notify_all()
            self._changed.wait_for(lambda: step in self._results or self._error)
            if step not in self._results:
                raise self._error
            return self._results.pop(step)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Sample nothing within the context. On entry, the batch that is being sampled is waited for."""
        with self._changed:
            self._pauses += 1
            self._changed.wait_for(lambda: not self._is_sampling)
        try:
            yield
        finally:
            with self._changed:
                self._pauses -= 1
                self._changed.notify_all()

    def take_busy(self) -> float:
        """Return the seconds of sampling since the last call."""
        with self._changed:
            now = time.perf_counter()
            busy = self._busy + (now - self._since if self._is_sampling else 0.0)
            self._busy, self._since = 0.0, now
            return busy

    def close(self) -> None:
        """Cancel the batch that is being sampled, and end the thread. Batches that wait are lost."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._cancel()
            self._thread.join()

    def _run(self) -> None:
        try:
            while (step := self._begun()) is not None:
                batch = self._sample(step)
                self._ended({step: batch}, None)
        except BaseException as error:  # `take` raises it in the driver's thread
            self._ended({}, error)

    def _begun(self) -> int | None:
        """Wait until the next batch may begin, and return its step. None: there will be none."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._is_closed or (self._next <= self._limit and not self._pauses)
            )
            if self._is_closed:
                return None
            self._is_sampling, self._since = True, time.perf_counter()
            self._next += 1
            return self._next - 1

    def _ended(self, results: dict[int, T], error: BaseException | None) -> None:
        with self._changed:
            self._busy += time.perf_counter() - self._since
            self._results |= results
            self._error, self._is_sampling = error, False
            self._changed.notify_all()
