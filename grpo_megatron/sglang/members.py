"""Membership: which engines of a pool serve requests, and how lost engines come back."""

import logging
import threading
from collections.abc import Callable, Sequence
from enum import Enum

from grpo_megatron.errors import UserError

logger = logging.getLogger(__name__)

# Number of times that a lost engine is started, and the seconds between two starts.
_STARTS, _BETWEEN_SECONDS = 3, 10.0


class _State(Enum):
    serving = "it has the newest weights, and gets requests"
    starting = "it was lost, and is being started again"
    ready = "it has started again, and gets weights with the next update"
    gone = "it was lost, and could not be started again"


class Membership:
    """The engines of a pool. An engine that is lost is started again in a thread, while the others serve.

    It gets requests only after a weight update in which it has taken part.
    """

    def __init__(self, names: Sequence[str], start_again: Callable[[int], None]):
        """Begin with engines that all serve.

        names: names of the engines, for messages.
        start_again: starts an engine again, and returns when it is ready. It may raise UserError. Its
            argument is the engine's index.
        """
        self._names, self._start_again = names, start_again
        self._lock = threading.Lock()
        self._states = [_State.serving] * len(names)
        self._starts = [0] * len(names)
        self._threads: list[threading.Thread] = []
        self._closed = threading.Event()

    @property
    def serving(self) -> list[int]:
        """Indices of the engines that get requests."""
        return self._with(_State.serving)

    @property
    def in_updates(self) -> list[int]:
        """Indices of the engines that take part in the next weight update."""
        return self._with(_State.serving, _State.ready)

    def _with(self, *states: _State) -> list[int]:
        with self._lock:
            return [index for index, state in enumerate(self._states) if state in states]

    def starts(self, index: int) -> int:
        """Return how often an engine was started again."""
        return self._starts[index]

    def lose(self, index: int, error: Exception) -> None:
        """Remove an engine, and start it again. Do nothing if it is removed already.

        error: the error by which the loss was noticed, for the message.
        """
        with self._lock:
            if self._states[index] not in (_State.serving, _State.ready) or self._closed.is_set():
                return
            self._states[index] = _State.starting
            left = self._states.count(_State.serving)
        logger.warning(
            f"{error}\n{self._names[index]} is started again; {left} of {len(self._names)} engines serve "
            "meanwhile, and its groups are sampled anew by them"
        )
        thread = threading.Thread(target=self._replace, args=(index,), name="start an engine", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _replace(self, index: int) -> None:
        state = _State.gone
        for _ in range(_STARTS):
            try:
                self._start_again(index)
                state = _State.ready
                break
            except UserError as error:
                if self._closed.is_set():
                    return
                logger.warning(f"{self._names[index]} could not be started again: {error}")
                self._closed.wait(_BETWEEN_SECONDS)
        with self._lock:
            self._states[index] = state
            self._starts[index] += 1
        if state == _State.ready:
            logger.info(f"{self._names[index]} has started again, and serves after the next weight sync")

    def updated(self, indices: Sequence[int]) -> None:
        """Note that engines have the newest weights, so that they get requests."""
        with self._lock:
            for index in indices:
                if self._states[index] == _State.ready:
                    self._states[index] = _State.serving

    def stop(self) -> None:
        """Start no engine again from now on."""
        self._closed.set()

    def join(self) -> None:
        """Wait until no engine is being started. `stop` must come before, and the engines must be ended."""
        for thread in self._threads:
            thread.join()
