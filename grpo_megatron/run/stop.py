"""A run that is asked to stop finishes its step, saves, and leaves."""

from collections.abc import Callable
from pathlib import Path
from signal import Signals
from typing import Any, Protocol

from grpo_megatron.errors import Stopped
from grpo_megatron.paths import within
from grpo_megatron.run.checkpoints import NotWritten, newest_folder

_CONTINUES = "the same command continues"
# What a file system may take to list the checkpoints: whoever ends a process says so before, and must not wait for one that hangs.
_LOOKING_SECONDS = 2.0


def outlook(folder: str | None) -> str:
    """What the run with this folder has reached: the end of a sentence. None: it has no folder yet. Never raises, and takes two seconds
    at most: the end of a run must not fail, nor wait, for its last word."""
    try:
        checkpoint = within(_LOOKING_SECONDS, lambda: newest_folder(folder)) if folder else None
    except (OSError, RuntimeError) as error:  # the latter where there can be no more threads
        why = "does not answer" if isinstance(error, TimeoutError) else f"cannot be read ({error})"
        return f"{folder} {why}, so its newest checkpoint is not known; {_CONTINUES} from it"
    return (
        f"its newest checkpoint is {checkpoint}, {_CONTINUES}" if checkpoint else "it had no checkpoint yet"
    )


class Saver(Protocol):
    folder: Path

    def save(self, state: dict) -> None: ...

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
        saved, reason = "", ""
        try:
            saver.save(state())
            saver.finish()
        except NotWritten as error:
            # Asked to stop is asked to stop: with the status of a failure a scheduler would not start the job again.
            saved, reason = ", which is not saved", f"\n{error}"
        reached = outlook(str(saver.folder.parent))
        raise Stopped(
            f"stopped on request ({self.signal.name}) after step {self.step}{saved}; {reached}{reason}"
        )

    def must_not_be_made(self, folder: str) -> None:
        """Where a process was lost, which would be replaced: a scheduler may have ended it together with asking. Raises Stopped."""
        if self.is_made:
            raise Stopped(
                f"stopped on request ({self.signal.name}) in step {self.step}, of which a process has ended too; {outlook(folder)}"
            )
