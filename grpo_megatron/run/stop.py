"""Requests to stop: the run finishes its step, saves a checkpoint, and leaves."""

from collections.abc import Callable
from pathlib import Path
from signal import Signals
from typing import Any, Protocol

from grpo_megatron.errors import Stopped
from grpo_megatron.run.checkpoints import NotWritten, newest_folder

_CONTINUES = "the same command continues from it"


def outlook(folder: str | None) -> str:
    """Return the end of a run's last message if it ends early: its newest checkpoint, and how to continue.

    folder: the run's folder; None if it does not exist yet.
    """
    try:
        checkpoint = newest_folder(folder) if folder else None
    except OSError as error:
        return f"{folder} cannot be read ({error}), so its newest checkpoint is not known; {_CONTINUES}"
    if checkpoint is None:
        return "the run has no checkpoint yet, so the same command starts it from the beginning"
    return f"the run's newest checkpoint is {checkpoint}; {_CONTINUES}"


class Saver(Protocol):
    """The part of the interface of a writer of checkpoints that StopRequest uses.

    Implemented by run.checkpoints.Checkpoints.
    """

    folder: Path

    def save(self, state: dict) -> None: ...

    def finish(self) -> None: ...


class StopRequest:
    """Tells whether the run has been asked to stop. The training loop checks this after each step.

    signal: the signal that asked the run to stop; None if the run has not been asked
    step: index of the step in progress, set by the training loop; None before the first step
    """

    def __init__(self) -> None:
        self.signal: Signals | None = None
        self.step: int | None = None

    @property
    def is_made(self) -> bool:
        return self.signal is not None

    def leave(self, saver: Saver, state: Callable[[], dict[str, Any]]) -> None:
        """Save a checkpoint and raise Stopped. The training loop calls this between steps if `is_made`.

        saver: writes the checkpoint.
        state: returns the driver's state for the checkpoint.
        """
        saved, reason = "", ""
        try:
            saver.save(state())
            saver.finish()
        except NotWritten as error:
            # The run stops all the same. After an exit status of failure, a scheduler would not start the job
            # again.
            saved, reason = ", whose checkpoint could not be written", f"\n{error}"
        reached = outlook(str(saver.folder.parent))
        raise Stopped(
            f"stopped on request ({self.signal.name}) after step {self.step}{saved}; {reached}{reason}"
        )

    def must_not_be_made(self, folder: str) -> None:
        """Raise Stopped if the run has been asked to stop. This is called before a lost process is replaced.

        A run that is to stop needs no replacement. The scheduler that asked may have ended the process.
        folder: the run's folder.
        """
        if self.is_made:
            raise Stopped(
                f"stopped on request ({self.signal.name}) in step {self.step}, during which a process of the "
                f"run also ended; {outlook(folder)}"
            )
