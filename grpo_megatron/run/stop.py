"""A run that is asked to stop finishes its step, saves, and leaves."""

from collections.abc import Callable
from pathlib import Path
from signal import Signals
from typing import Any, Protocol

CONTINUES = "the same command continues"


class Stopped(Exception):
    """The run has left on request, and can go on."""

    exit_status = 75  # EX_TEMPFAIL: a scheduler should put the job into its queue again


class Saver(Protocol):
    folder: Path

    def save(self, step: int, state: dict) -> None: ...

    def finish(self) -> None: ...


class StopRequest:
    """Whether the run has been asked to stop; asked after each step.

    signal: by which, None if it has not. step: what is being done, set by the loop; None before the first one, when there is nothing
    to finish.
    """

    def __init__(self) -> None:
        self.signal: Signals | None = None
        self.step: int | None = None

    @property
    def is_made(self) -> bool:
        return self.signal is not None

    def leave(self, saver: Saver, state: Callable[[], dict[str, Any]]) -> None:
        """After a step: save, and raise Stopped."""
        saver.save(self.step, state())
        saver.finish()
        raise Stopped(
            f"stopped on request ({self.signal.name}) after step {self.step}, with a checkpoint in {saver.folder}; {CONTINUES}"
        )
