"""Checkpoint folders: the actor's distributed checkpoint beside the driver's state."""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from grpo_megatron.errors import UserError, shortened
from grpo_megatron.json_files import read_object
from grpo_megatron.paths import folder_problem, is_absent, sync_to_disk


@dataclass(frozen=True)
class SaveReport:
    """seconds: from the beginning until the files were on the disk. waited: how long training stood still for it. bytes: written."""

    seconds: float
    waited: float
    bytes: int


class Saveable(Protocol):
    """Whose state a checkpoint is of; see PolicyTrainer."""

    def begin_checkpoint(self, folder: str) -> None: ...

    def checkpoint_written(self) -> bool: ...

    def finish_checkpoint(self, timeout: float | None = None) -> SaveReport: ...


class Checkpoints:
    """`step_00000010/actor` and `step_00000010/state.json` under one folder.

    A checkpoint is written aside, while training goes on, and renamed when all of it is on the disk: a folder with a final
    name is complete, whenever the run is killed. One that has this name already goes when its successor is complete.
    """

    def __init__(self, folder: str, every: int, trainer: Saveable, say: Callable[[str], None], background: bool = True):
        """every: save every this many steps; 0: never. say: shows a line. background: training does not wait for the disk."""
        self.folder = Path(folder)
        self._every, self._trainer, self._say, self._background = every, trainer, say, background
        self._writing: Path | None = None  # final name of the checkpoint that the ranks are writing

    def is_due(self, step: int) -> bool:
        """Whether `after_step` will save."""
        return bool(self._every) and step % self._every == 0

    def after_step(self, step: int, state: Callable[[], dict]) -> None:
        """Complete what the ranks have written meanwhile, and save if it is time. state: makes what `save` takes."""
        if self._writing and self._trainer.checkpoint_written():
            self.finish()
        if self.is_due(step):
            self.save(step, state())

    def save(self, step: int, state: dict) -> None:
        """Begin a checkpoint, which is there after `finish`. state: JSON-serialisable, with its "step"."""
        self.finish()
        final = self.folder / f"step_{step:08d}"
        aside = _aside(final, "partial")
        aside.mkdir(parents=True)
        (aside / "state.json").write_text(json.dumps(state), encoding="utf-8")
        self._trainer.begin_checkpoint(str((aside / "actor").absolute()))
        self._writing = final
        if not self._background:
            self.finish()

    def finish(self, timeout: float | None = None) -> None:
        """Wait for the checkpoint that is being written, if any, and put it in place. Raises UserError if it failed.

        timeout: in seconds, if not that of all calls.
        """
        if self._writing is None:
            return
        final, self._writing = self._writing, None
        report = self._trainer.finish_checkpoint(timeout)
        whole = final.with_name(f"{final.name}.partial")
        sync_to_disk(whole / "state.json")
        sync_to_disk(whole)
        replaced = _aside(final, "replaced")
        if final.exists():
            final.rename(replaced)
        whole.rename(final)
        sync_to_disk(self.folder)
        if replaced.exists():
            shutil.rmtree(replaced)
        self._say(
            f"checkpoint {final.name}: {report.bytes / 1e9:.2f} GB in {report.seconds:.1f} s, "
            f"of which training waited {report.waited:.1f} s"
        )


def _aside(final: Path, suffix: str) -> Path:
    """The folder beside `final` for what is not, or no longer, in place; without what a killed run left there."""
    aside = final.with_name(f"{final.name}.{suffix}")
    if aside.exists():
        shutil.rmtree(aside)
    return aside


# What the driver of each command keeps beside the weights.
_STATE = {"train": ("step", "totals", "rollouts", "prompts", "algorithm"), "sft": ("step", "order")}


def read_state(folder: str | None, command: str) -> dict[str, Any] | None:
    """The driver's state in a checkpoint; None without one. command: train or sft, which is to continue from it.

    Raises UserError for an incomplete or damaged folder, and for a checkpoint of the other command.
    """
    if folder is None:
        return None
    root = Path(folder)
    state = root / "state.json"
    if folder_problem(root):
        raise UserError(f"run.resume={folder} {folder_problem(root)}; it must be a checkpoint's folder")
    if is_absent(state) or folder_problem(root / "actor") or root.name.endswith(".partial"):
        raise UserError(f"run.resume={folder} is not a whole checkpoint (it needs state.json and actor/)")
    values = read_object(state)
    absent = [key for key in _STATE[command] if key not in values]
    if absent:
        raise UserError(f"{state} has no {', '.join(absent)}: this is no checkpoint of `{command}`, or a damaged one")
    step = values["step"]
    if type(step) is not int or step < 0:
        raise UserError(f"{state}: step must be the number of a step, is {shortened(repr(step))}; the checkpoint is damaged")
    return values


def newest_checkpoint(folder: str) -> str | None:
    """The whole checkpoint of the latest step under a run's folder of them; None without one."""
    whole = [path for path in Path(folder).glob("step_*") if path.suffix == ""]
    return str(max(whole)) if whole else None


def actor_folder(folder: str) -> str:
    return str((Path(folder) / "actor").absolute())
