"""Requests to stop, after which the run finishes its current step, saves a checkpoint, and ends."""

from collections.abc import Callable
from signal import Signals
from typing import Any

from grpo_megatron.errors import Stopped
from grpo_megatron.run.checkpoints import Checkpoints, NotWritten, newest_folder

_CONTINUES = "the same command continues from it"


def outlook(folder: str | None) -> str:
    """Return a clause that names the run's newest checkpoint and says how to continue.

    The clause is the end of the last message of a run that ends early.

    folder: the run's folder; None if it does not exist yet.
    """
    try:
        checkpoint = newest_folder(folder) if folder else None
    except OSError as error:
        return f"{folder} cannot be read ({error}), so its newest checkpoint is not known; {_CONTINUES}"
    if checkpoint is None:
        return "the run has no checkpoint yet, so the same command starts it from the beginning"
    return f"the run's newest checkpoint is {checkpoint}; {_CONTINUES}"


class StopRequest:
    """Tells whether the run has been asked to stop, and stops the run.

    A signal handler sets `signal`. From then on, `is_made` is True, which the training loop checks after each
    step.

    signal: the signal that asked the run to stop; None if the run has not been asked
    step: index of the step in progress, set by the training loop; None before the first step
    """

    def __init__(self) -> None:
        self.signal: Signals | None = None
        self.step: int | None = None

    @property
    def is_made(self) -> bool:
        return self.signal is not None

    def leave(self, checkpoints: Checkpoints, state: Callable[[], dict[str, Any]]) -> None:
        """Save a checkpoint and raise Stopped.

        The training loop calls this method between steps if `is_made` is True. Stopped is raised even if the
        checkpoint could not be written; its message says so.

        checkpoints: writes the checkpoint.
        state: function that returns the driver's state for the checkpoint.
        """
        saved, reason = "", ""
        try:
            checkpoints.save(self.step, state)
            checkpoints.finish()
        except NotWritten as error:
            # Stopped ends the process with another exit status than an error. After an error, a scheduler
            # would not start the job again.
            saved, reason = ", whose checkpoint could not be written", f"\n{error}"
        reached = outlook(str(checkpoints.folder.parent))
        raise Stopped(
            f"stopped on request ({self.signal.name}) after step {self.step}{saved}; {reached}{reason}"
        )

    def must_not_be_made(self, folder: str) -> None:
        """Raise Stopped if the run has been asked to stop. Call this before a lost process is replaced.

        A run that is about to stop needs no replacement. The request often explains the loss: a scheduler
        that asks a run to stop may also end its processes.

        folder: the run's folder.
        """
        if self.is_made:
            raise Stopped(
                f"stopped on request ({self.signal.name}) in step {self.step}, during which a process of the "
                f"run also ended; {outlook(folder)}"
            )
