"""Membership: records which engines of a pool serve requests, and starts lost engines again."""

import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from enum import Enum

logger = logging.getLogger(__name__)

# Number of times that a lost engine is started, and the seconds between two starts.
_STARTS, _BETWEEN_SECONDS = 3, 10.0
# An engine that is lost this often, each time before it has served for two weight updates, stays away.
_EARLY_LOSSES = 3


class _State(Enum):
    serving = "it has the newest weights, and gets requests"
    starting = "it is new or was lost, and is being started"
    ready = "it has started, and gets weights with the next update"
    held = "it keeps its weights for an evaluation, and gets requests of the evaluation only"
    gone = "it was lost, and is not started again"


class Membership:
    """Records which engines of a pool serve requests, and starts lost engines again in threads.

    An engine that has been started again gets requests only after it has taken part in a weight update. An
    engine is identified by its index and by its number of starts, which increases when it is started again.
    So a call about an engine's earlier process does not affect its present process.
    """

    def __init__(
        self,
        names: Sequence[str],
        start_again: Callable[[int], None],
        give_up: Callable[[int], None] = lambda index: None,
        patience: float = 0.0,
        missing: Collection[int] = (),
        gone: Collection[int] = (),
    ):
        """Begin with engines that serve, except for `missing` and `gone`.

        names: names of all engines, for messages.
        start_again: starts an engine again, and returns when it is ready. Its argument is the engine's index.
        give_up: ends an engine that is not started again. Its argument is the engine's index.
        patience: maximum seconds to go on without any engine that serves, while lost engines are started
            again.
        missing: indices of engines to start now, each in a thread.
        gone: indices of engines that were lost, and are not started again.
        """
        self._names, self._patience = list(names), patience
        self._start_again, self._give_up = start_again, give_up
        self._lock = threading.Lock()
        self._last_loss: tuple[float, Exception] | None = None  # when it was noticed, and its error
        self._states = [_State.serving] * len(names)
        self._starts = [0] * len(names)
        self._found: dict[tuple[_State, ...], Mapping[int, int]] = {}  # what `_with` has returned
        self._updates = [2] * len(names)  # updates since the engine began to serve
        self._early_losses = [0] * len(names)
        self._threads: list[threading.Thread] = []
        self._closed = threading.Event()
        for index in gone:
            self._states[index] = _State.gone
        for index in missing:
            self._states[index] = _State.starting
        for index in missing:
            self._begin(self._replace, index)

    @property
    def serving(self) -> Mapping[int, int]:
        """{engine index: number of starts} of the engines that get requests. A restart changes the number."""
        return self._with(_State.serving)

    @property
    def in_updates(self) -> Mapping[int, int]:
        """{engine index: number of starts} of the engines that take part in the next weight update."""
        return self._with(_State.serving, _State.ready)

    @property
    def alive(self) -> Mapping[int, int]:
        """{engine index: number of starts} of the engines that have started and have not been lost since."""
        return self._with(_State.serving, _State.ready, _State.held)

    def not_lost(self, engines: Mapping[int, int]) -> dict[int, int]:
        """Return those of the given engines that are alive, and have not been started again in the meantime.

        engines: {index: number of starts}. An engine that has been started again has a higher number by now.
            The result has the same form.
        """
        return dict(engines.items() & self.alive.items())

    def _with(self, *states: _State) -> Mapping[int, int]:
        with self._lock:
            # This is asked for each group, and a large run has a thousand engines.
            if states not in self._found:
                self._found[states] = {
                    index: self._starts[index] for index, state in enumerate(self._states) if state in states
                }
            return self._found[states]

    def _set(self, index: int, state: _State) -> None:
        """Change the state of an engine. The caller must hold `self._lock`."""
        self._states[index] = state
        self._found = {}

    def lose(self, index: int, starts: int, error: Exception) -> None:
        """Record that an engine was lost, and start it again in a thread.

        Nothing is done if the loss of this process is recorded already, or after `stop`. An engine that was
        lost three times in a row, each time before its second weight update, is given up instead of started
        again.

        starts: number of starts of the process that was lost.
        error: the error by which the loss was noticed.

        Raises `error`, and records no loss, if no other engine serves and one of these is true: `patience` is
        0, or neither this engine nor another one would be started again.
        """
        with self._lock:
            is_alive = self._states[index] in (_State.serving, _State.ready, _State.held)
            if not is_alive or self._starts[index] != starts or self._closed.is_set():
                return
            others = [state for other, state in enumerate(self._states) if other != index]
            left = others.count(_State.serving)
            early = self._early_losses[index] + 1 if self._updates[index] < 2 else 0
            stays_away = early == _EARLY_LOSSES
            if not left and (not self._patience or (stays_away and set(others) <= {_State.gone})):
                raise error
            self._last_loss = time.monotonic(), error
            self._early_losses[index], self._updates[index] = early, 0
            self._set(index, _State.gone if stays_away else _State.starting)
        follows = "is not started again, because it was lost soon after each start"
        meanwhile = f"{left} of {len(self._names)} engines serve meanwhile, and continue its groups"
        logger.warning(
            f"{error}\n{self._names[index]} {follows if stays_away else 'is started again'}; "
            f"{meanwhile if left else 'no engine serves meanwhile, and its groups wait'}"
        )
        self._begin(self._give_up if stays_away else self._replace, index)

    def _begin(self, work: Callable[[int], None], index: int) -> None:
        thread = threading.Thread(target=work, args=(index,), name=f"start of engine {index}", daemon=True)
        self._threads.append(thread)
        thread.start()

    def add(self, name: str) -> None:
        """Start one more engine in a thread. The engine gets the next index. name: its name, for messages."""
        with self._lock:
            index = len(self._names)
            self._names.append(name)
            self._states.append(_State.starting)
            self._starts.append(0)
            self._updates.append(0)
            self._early_losses.append(0)
            self._found = {}
        self._begin(self._replace, index)

    def must_come_back(self) -> None:
        """Raise the error of the last loss if it makes no sense to wait for an engine any longer.

        Nothing is raised if an engine serves, or is ready for the next weight update. Otherwise, the error is
        raised if no engine is being started, or if the last loss was more than `patience` seconds ago.
        """
        with self._lock:
            if {_State.serving, _State.ready} & set(self._states):
                return
            since, error = self._last_loss
            if set(self._states) <= {_State.gone, _State.held} or time.monotonic() - since > self._patience:
                raise error

    def _replace(self, index: int) -> None:
        state = _State.gone
        for _ in range(_STARTS):
            try:
                self._start_again(index)
                state = _State.ready
                break
            except Exception as error:
                if self._closed.is_set():
                    return
                logger.warning(f"{self._names[index]} could not be started: {error}")
                self._closed.wait(_BETWEEN_SECONDS)
        with self._lock:
            self._starts[index] += 1
            self._set(index, state)
        if state == _State.gone:
            self._give_up(index)
        else:
            logger.info(f"{self._names[index]} has started, and will get requests after the next weight sync")

    def updated(self, engines: Mapping[int, int]) -> None:
        """Let engines get requests, because a weight update has given them the newest weights.

        engines: {index: number of starts} of the engines that have been updated. Engines that have been lost
            or started again since are ignored.
        """
        with self._lock:
            for index, starts in engines.items():
                if self._starts[index] == starts and self._states[index] in (_State.ready, _State.serving):
                    self._updates[index] += 1
                    if self._states[index] == _State.ready:
                        self._set(index, _State.serving)

    def hold(self, most: int) -> dict[int, int]:
        """Let some engines that serve keep their weights until `release`. They get no requests for training.

        At least one engine goes on serving.

        most: maximum number of engines to hold, at least 1.

        Returns {index: number of starts} of the engines that are held, empty if only one engine serves.
        """
        with self._lock:
            serving = [index for index, state in enumerate(self._states) if state == _State.serving]
            held = serving[1:][-most:]
            for index in held:
                self._set(index, _State.held)
            return {index: self._starts[index] for index in held}

    def release(self, engines: Mapping[int, int]) -> None:
        """Let held engines take part in the next weight update, and serve after it.

        engines: the result of `hold`. Engines that have been lost since are ignored.
        """
        with self._lock:
            for index, starts in engines.items():
                if self._states[index] == _State.held and self._starts[index] == starts:
                    self._set(index, _State.ready)

    def stop(self) -> None:
        """Start no engine again from now on."""
        self._closed.set()

    def join(self) -> None:
        """Wait until no engine is being started. Call `stop` and end the engines' processes before."""
        for thread in self._threads:
            thread.join()
