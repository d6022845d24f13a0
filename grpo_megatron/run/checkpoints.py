"""Checkpoint folders: the actor's distributed checkpoint beside the driver's state."""

import json
import shutil
from pathlib import Path

from grpo_megatron.errors import UserError


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


def read_state(folder: str | None) -> dict | None:
    """The driver's state in a checkpoint; None without one. Raises UserError for an incomplete folder."""
    if folder is None:
        return None
    root = Path(folder)
    state = root / "state.json"
    if not state.is_file() or not (root / "actor").is_dir() or root.name.endswith(".partial"):
        raise UserError(f"run.resume={folder} is not a whole checkpoint (it needs state.json and actor/)")
    return json.loads(state.read_text(encoding="utf-8"))


def actor_folder(folder: str) -> str:
    return str((Path(folder) / "actor").absolute())
