"""An output folder that is written under a temporary name and renamed when it is complete.

An interrupted conversion can be continued: files that are already complete are kept.
"""

import fcntl
import json
import logging
import shutil
from pathlib import Path
from typing import Any

from grpo_megatron.errors import UserError
from grpo_megatron.files import json_text, read_object, replace_text, sync_to_disk, writing

logger = logging.getLogger(__name__)

_PLAN, _LOCK, _NOTES, _RESULT = "plan.json", "lock", "notes", "result"


class PartialFolder:
    """The folder `target`.partial, in which a conversion collects its output until the output is complete.

    The folder contains the finished output files, and a note for each of these files, so that an interrupted
    conversion can be continued. A note is any JSON value, such as the offsets of tensors in the file. At the
    end, the folder with the output files is renamed to `target`.

    The conversion must write each file as NAME.tmp, sync it to disk and rename it to NAME. A file with the
    name NAME is then always complete.

    plan: JSON-serialisable description of what the output is made from, such as source files and dtype. A
        conversion continues an earlier one only if both have the same plan.

    Raises UserError if `target` exists and is not an empty folder. Raises UserError also if the partial
    folder was begun with another plan, or if another process is writing to it.
    """

    def __init__(self, target: str, plan: dict[str, Any]):
        self.target = Path(target)
        refuse_existing(target)
        self.root = Path(f"{target}.partial")
        self.result, self._notes = self.root / _RESULT, self.root / _NOTES
        with writing(self.root):
            self.root.mkdir(parents=True, exist_ok=True)
            self._lock = open(self.root / _LOCK, "w")  # noqa: SIM115 the lock is held until this object is deleted
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"another process is writing to {self.root}; wait until it is done, or stop it"
            ) from None
        except OSError as error:
            logger.warning(
                f"{self.root}: this file system does not support locks ({error.strerror}), so a second "
                "conversion to this folder would not be noticed"
            )
        with writing(self.root):
            self._continue_or_begin(json.loads(json_text(plan)))

    def _continue_or_begin(self, plan: dict[str, Any]) -> None:
        if any(self._notes.glob("*.json")):
            before = read_object(self.root / _PLAN)
            different = sorted(key for key in plan.keys() | before.keys() if plan.get(key) != before.get(key))
            if different:
                raise UserError(
                    f"{self.root} was created with different settings or source files "
                    f"({', '.join(different)}); delete it to start over, or choose another target"
                )
            return
        for leftover in (self.result, self._notes):
            shutil.rmtree(leftover, ignore_errors=True)
            leftover.mkdir()
        replace_text(self.root / _PLAN, json_text(plan))

    def note(self, name: str) -> Any:
        """Return the JSON value that `add_note` stored for an output file; None if the file is not finished.

        name: path of the file relative to the target folder.
        """
        path = self._note_of(name)
        return read_object(path)["note"] if path.is_file() and (self.result / name).is_file() else None

    def add_note(self, name: str, note: Any) -> None:
        """Record that an output file is finished, so that a continued conversion skips the file.

        name: path of the file relative to the target folder.
        note: any JSON value that the continued conversion needs. The method `note` returns it.
        """
        path = self._note_of(name)
        with writing(path):
            replace_text(path, json_text({"note": note}))

    def _note_of(self, name: str) -> Path:
        return self._notes / f"{name.replace('/', '-')}.json"

    def check_space(self, needed: int) -> None:
        """Raise UserError if the disk has fewer than `needed` free bytes. Called before a conversion."""
        free = shutil.disk_usage(self.root).free
        if free < needed:
            raise UserError(
                f"{self.root} needs {needed / 1e9:.2f} GB more, but only {free / 1e9:.2f} GB are free; free "
                "some disk space, or choose a target on another disk"
            )

    def finish(self) -> None:
        """Rename the folder with the output files to `target`, and delete the partial folder.

        All files must have been written. The object cannot be used afterwards.
        """
        with writing(self.root):
            for folder in (self.result, *(path for path in self.result.rglob("*") if path.is_dir())):
                sync_to_disk(folder)
            self.result.rename(self.target)
            shutil.rmtree(self.root)
        self._lock.close()


def refuse_existing(target: str) -> None:
    """Raise UserError unless the target is absent or an empty folder, so that nothing is overwritten."""
    path = Path(target)
    if path.exists() and not (path.is_dir() and not any(path.iterdir())):
        raise UserError(f"{target} exists and is not an empty folder; delete it, or choose another target")


def refuse_unfinished(partial: str) -> None:
    """Raise UserError if the folder `partial` is the PartialFolder of a conversion that can be continued."""
    if Path(partial, _PLAN).exists():
        raise UserError(
            f"{partial} belongs to a conversion that has not finished; run its command again to continue it, "
            "delete the folder, or choose another target"
        )


def files_of(folder: str | Path, suffixes: tuple[str, ...]) -> list[list]:
    """List the files of a folder and its subfolders, to notice later if the files have changed.

    Return [[path, bytes, modification time in ns]], sorted by path. Paths are relative to the folder. An
    interrupted conversion compares this list of its source files with the list from its first start, and
    continues only if they are equal.

    suffixes: endings of the names of the files to list.
    """
    found = [path for path in Path(folder).rglob("*") if path.is_file() and path.name.endswith(suffixes)]
    return [
        [str(path.relative_to(folder)), path.stat().st_size, path.stat().st_mtime_ns]
        for path in sorted(found)
    ]
