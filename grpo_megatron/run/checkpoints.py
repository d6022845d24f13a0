"""Checkpoint folders: the actor's distributed checkpoint beside the driver's state."""

import json
import shutil
from pathlib import Path
from typing import Any

from grpo_megatron.errors import UserError, shortened
from grpo_megatron.json_files import read_object
from grpo_megatron.paths import folder_problem, is_absent


class Checkpoints:
    """`step_00000010/actor` and `step_00000010/state.json` under one folder.

    A checkpoint is written aside and renamed when whole, so a folder with a final name is complete.
    """

    def __init__(self, folder: str, every: int):
        """every: `due` says so every this many steps; 0: never."""
        self.folder = Path(folder)
        self.every = every

    def due(self, step: int) -> bool:
        return self.every > 0 and step % self.every == 0

    def save(self, step: int, actor, state: dict) -> str:
        """state: JSON-serialisable, with its "step". Returns the folder."""
        final = self.folder / f"step_{step:08d}"
        aside = self.folder / f"{final.name}.partial"
        for leftover in (aside, final):
            if leftover.exists():
                shutil.rmtree(leftover)
        aside.mkdir(parents=True)
        actor.save_checkpoint(str((aside / "actor").absolute()))
        (aside / "state.json").write_text(json.dumps(state), encoding="utf-8")
        aside.rename(final)
        return str(final)


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


def actor_folder(folder: str) -> str:
    return str((Path(folder) / "actor").absolute())
