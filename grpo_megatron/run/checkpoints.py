"""Writing of checkpoints: when, where, and how many are kept. run/resume.py reads checkpoints."""

import logging
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from grpo_megatron.config.schema import CheckpointConfig
from grpo_megatron.errors import UserError
from grpo_megatron.files import json_text, numbered, sync_to_disk
from grpo_megatron.monitoring.run_files import METRICS
from grpo_megatron.paths import is_absent
from grpo_megatron.run.lock import is_in_use
from grpo_megatron.run.manifest import FileRecord, record_of, write_manifest
from grpo_megatron.samples.blocks import LEDGER

logger = logging.getLogger(__name__)

CHECKPOINTS = "checkpoints"  # subfolder of a run's folder
ACTOR, STATE = "actor", "state.json"
DELETED = ".deleted"  # part of the name of a folder that is being deleted


class NotWritten(UserError):
    """Error of a checkpoint that could not be written, for example because the disk is full.

    The run can go on and write the next checkpoint later.
    """


@dataclass(frozen=True)
class SaveReport:
    """Result of writing the trainer's part of a checkpoint.

    seconds: time from the beginning until the files were on the disk
    waited: seconds for which training was blocked by the checkpoint
    bytes: total size of the files
    files: {path of a file, relative to the checkpoint's subfolder `actor`: its size and digest}
    """

    seconds: float
    waited: float
    bytes: int
    files: dict[str, FileRecord] = field(default_factory=dict)


class Saveable(Protocol):
    """Interface of a trainer that writes its state into a folder while training goes on.

    Checkpoints uses this interface. trainer.checkpoints.TrainerCheckpoints implements it.
    """

    def begin_checkpoint(self, folder: str) -> None: ...

    def checkpoint_written(self) -> bool: ...

    def finish_checkpoint(self, timeout: float | None = None) -> SaveReport: ...


class Checkpoints:
    """Decides when a run writes checkpoints, writes them in the background, and deletes old ones.

    A checkpoint is a folder such as `step_00000010/` with the trainer's files in `actor/`, the driver's state
    in state.json, and manifest.json. The folder has a temporary name until all files are on the disk. A
    folder with a final name is therefore complete, even if the run is killed. If a checkpoint cannot be
    written, a warning is logged, and the run goes on.

    folder: the folder that contains the checkpoints
    """

    def __init__(
        self,
        folder: str,
        config: CheckpointConfig,
        trainer: Saveable,
        resumed: int = 0,
        about: dict[str, Any] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        """Prepare to write the checkpoints of a run.

        folder: the folder that contains the run's checkpoints
        config: when to write checkpoints, and how many to keep
        trainer: writes the trainer's state into each checkpoint
        resumed: the step after which the run continues; 0 for a new run
        about: entries of state.json that are the same in all checkpoints, such as the configuration
        clock: function that returns the present time in seconds
        """
        self.folder = Path(folder)
        self._config, self._trainer, self._about, self._clock = (
            config,
            trainer,
            about or {},
            clock,
        )
        self._writing: Path | None = None  # final name of the checkpoint that the ranks are writing
        self._last_step, self._last_begun = resumed, clock()
        self._failure: NotWritten | None = None  # error of the last attempt

    def is_due(self, step: int, last: bool = False) -> bool:
        """Return True if checkpoint.every, checkpoint.minutes or checkpoint.at_end asks for a checkpoint now.

        step: index of the step that has just ended.
        last: True if this is the run's last step.
        """
        config = self._config
        by_steps = config.every > 0 and step % config.every == 0
        by_time = config.minutes > 0 and self._clock() - self._last_begun >= 60 * config.minutes
        return by_steps or by_time or (last and config.at_end and step != self._last_step)

    def complete_written(self) -> None:
        """Complete the checkpoint in progress if the ranks have written all files. Do not wait for them.

        Completing writes the manifest, renames the folder to its final name, and deletes old checkpoints.
        """
        if self._writing and self._trainer.checkpoint_written():
            self._complete()

    def save(self, step: int, state: Callable[[], dict[str, Any]]) -> None:
        """Begin to write a checkpoint. `complete_written` or `finish` completes it later.

        This method waits until the previous checkpoint is complete. If the step has a checkpoint already, no
        other is written. If checkpoint.async_save is off, the checkpoint is complete when this method
        returns. A failure is only logged here, and `finish` raises it later.

        step: index of the step that has just ended.
        state: function that returns the driver's state for state.json, as JSON values. It is called after the
            previous checkpoint is complete, because this may free space on the disk. It may raise OSError if
            a file that the checkpoint needs, such as the ledger, cannot be written.
        """
        self._complete()
        self._last_step, self._last_begun = step, self._clock()
        final = self.folder / f"step_{step:08d}"
        if final.exists():
            return
        try:
            partial = final.with_name(f"{final.name}.partial")
            if partial.exists():  # a run that was killed left it
                discard(partial)
            partial.mkdir(parents=True)
            (partial / STATE).write_text(json_text(self._about | state()), encoding="utf-8")
        except OSError as error:
            self._give_up(final, NotWritten(f"{final} could not be written: {error}"))
            return
        self._trainer.begin_checkpoint(str((partial / ACTOR).absolute()))
        self._writing = final
        if not self._config.async_save:
            self._complete()

    def finish(self, timeout: float | None = None) -> None:
        """Wait for the checkpoint in progress, if there is one, and complete it.

        timeout: maximum number of seconds to wait. None: the timeout of the trainer's other calls.

        Raises NotWritten if the last attempt to write a checkpoint failed.
        """
        self._complete(timeout)
        if self._failure:
            raise self._failure

    def _complete(self, timeout: float | None = None) -> None:
        if self._writing is None:
            return
        final, self._writing = self._writing, None
        try:
            report = self._trainer.finish_checkpoint(timeout)
            self._put_in_place(final, report)
        except NotWritten as error:
            self._give_up(final, error)
        except OSError as error:
            self._give_up(final, NotWritten(f"{final} could not be written: {error}"))
        else:
            self._failure = None
            logger.info(
                f"wrote checkpoint {final.name}: {report.bytes / 1e9:.2f} GB in {report.seconds:.1f} s; "
                f"training waited {report.waited:.1f} s of these"
            )
            self._remove_old(final)

    def _put_in_place(self, final: Path, report: SaveReport) -> None:
        whole = final.with_name(f"{final.name}.partial")
        sync_to_disk(whole / STATE)
        files = {f"{ACTOR}/{name}": record for name, record in report.files.items()}
        write_manifest(whole, files | {STATE: record_of(whole / STATE)})
        sync_to_disk(whole)
        # A run that continues from this checkpoint after the loss of a node needs what these files have.
        for name in (METRICS, LEDGER):
            if not is_absent(rows := self.folder.parent / name):
                sync_to_disk(rows)
        whole.rename(final)
        sync_to_disk(self.folder)

    def _give_up(self, final: Path, error: NotWritten) -> None:
        """Give up a checkpoint that could not be written: log a warning, and delete its files to free space.

        The error is kept in `_failure`, so that `finish` can raise it.

        final: path that the folder of the complete checkpoint would have had.
        error: the reason.
        """
        shutil.rmtree(final.with_name(f"{final.name}.partial"), ignore_errors=True)
        whole = folders(self.folder)
        kept = f"the newest checkpoint is {whole[-1].name}" if whole else "there is no checkpoint yet"
        self._failure = NotWritten(
            f"{error}; {kept}. Fix the cause, such as a full disk, so that the next one can be written"
        )
        logger.warning(f"training continues, but {self._failure}")

    def _remove_old(self, written: Path) -> None:
        """Delete old checkpoints, but not the one that was just written.

        A user's own loop may have gone back to an earlier step, and have checkpoints of later ones.
        """
        for path in folders(self.folder)[: -self._config.keep]:
            lasting = self._config.keep_every and step_of(path) % self._config.keep_every == 0
            if path != written and not lasting and not is_in_use(path):
                discard(path)


def discard(folder: Path) -> None:
    """Delete the folder of a checkpoint, as far as possible.

    The folder is renamed before its files are deleted, so that nobody takes remaining files for a complete
    checkpoint. Files may remain on NFS if a process has them open. If files remain or the renaming fails, a
    warning is logged but no error is raised. Remaining files are deleted at the next start of the run.
    """
    try:
        if DELETED not in folder.suffixes:
            aside = folder.with_name(f"{folder.name}{DELETED}")
            folder = folder.rename(numbered(aside) if aside.exists() else aside)
    except OSError as error:
        logger.warning(f"{folder} could not be deleted: {error}; delete it manually")
        return
    shutil.rmtree(folder, ignore_errors=True)
    if folder.exists():
        logger.warning(
            f"{folder} could not be deleted completely, probably because another process has a file in it "
            "open; the run will try again the next time it starts"
        )


def folders(root: Path) -> list[Path]:
    """Return the folders of complete checkpoints (`step_XXXXXXXX`) in `root`, in the order of their steps."""
    found = [path for path in root.glob("step_*") if path.name.removeprefix("step_").isdecimal()]
    return sorted(found, key=step_of)


def newest_folder(directory: str) -> Path | None:
    """Return the folder of a run's newest complete checkpoint, or None if there is none.

    The files are not checked for damage. Use the result only in messages to the user.

    directory: the run's folder.
    """
    found = folders(Path(directory, CHECKPOINTS))
    return found[-1] if found else None


def step_of(path: Path) -> int:
    return int(path.name.removeprefix("step_"))
