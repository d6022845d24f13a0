"""Start of a run: choose and check the checkpoint to begin from, and find the settings that have changed."""

import json
import logging
import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_megatron.config.command import Command
from grpo_megatron.config.load import leaves, plain
from grpo_megatron.config.schema import Config
from grpo_megatron.errors import ANOTHER_RUN, UserError, shortened
from grpo_megatron.files import json_text, read_object, reading
from grpo_megatron.paths import folder_problem, is_absent
from grpo_megatron.run.checkpoints import ACTOR, STATE, folders, step_of
from grpo_megatron.run.manifest import (
    MANIFEST,
    DamagedCheckpoint,
    FileRecord,
    must_be_sound,
    problems,
    read_manifest,
)

logger = logging.getLogger(__name__)

AUTO, ANEW = "auto", (None, "none")
RESULT = "result.json"

# Keys that state.json of each command's checkpoints must have.
_STATE = {
    Command.train: ("step", "totals", "rollouts", "prompts", "algorithm", "trainer", "evaluations", "ledger"),
    Command.sft: ("step", "order", "tokens"),
    Command.reward_model: ("step", "order", "trained_tokens", "evaluations"),
    Command.serve: ("step", "weight_sync"),
}


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint to begin from, after a quick check: all file sizes, and the digest of state.json.

    The digests of the ranks' files are checked later, when the ranks read these files.

    folder: path of the checkpoint
    state: content of state.json, the state of the driver process
    files: {path of a rank's file, relative to the subfolder `actor`: its size and digest}
    """

    folder: str
    state: dict[str, Any]
    files: dict[str, FileRecord]

    @property
    def step(self) -> int:
        return self.state["step"]

    @property
    def actor(self) -> str:
        return str(Path(self.folder, ACTOR).absolute())

    def __str__(self) -> str:
        return self.folder


def open_checkpoint(folder: str | Path, command: Command) -> Checkpoint:
    """Return the checkpoint in `folder`, after checking its file sizes and the digest of state.json.

    command: the command that continues from the checkpoint.

    Raises UserError if the folder is not a checkpoint, cannot be read, or belongs to another command. Raises
    DamagedCheckpoint if a file is missing, has a wrong size, or is a damaged state.json.
    """
    root = Path(folder)
    if folder_problem(root):
        raise UserError(f"run.resume={folder} {folder_problem(root)}; it must be a checkpoint folder")
    if is_absent(root / MANIFEST) or root.name.endswith(".partial"):
        raise DamagedCheckpoint(
            f"run.resume={folder} is not a complete checkpoint, because it has no {MANIFEST} or its name "
            "ends in .partial; an earlier checkpoint may be complete"
        )
    files = read_manifest(root)
    actor = {
        name.removeprefix(f"{ACTOR}/"): record
        for name, record in files.items()
        if name.startswith(f"{ACTOR}/")
    }
    if not actor or STATE not in files:
        raise UserError(
            f"run.resume={folder} is not a run's checkpoint, because its {MANIFEST} does not list {STATE} "
            f"and files in {ACTOR}/; choose another checkpoint"
        )
    must_be_sound(problems(root, files, [STATE]))
    return Checkpoint(str(folder), _read_state(root / STATE, command), actor)


def _read_state(path: Path, command: Command) -> dict[str, Any]:
    values = read_object(path)
    absent = [key for key in _STATE[command] if key not in values]
    if absent:
        raise UserError(
            f"{path} has no {', '.join(absent)}, because a command other than `{command}` or a different "
            f"version wrote this checkpoint; {ANOTHER_RUN}"
        )
    step = values["step"]
    if type(step) is not int or step < 0:
        raise UserError(
            f"{path}: step must be a step number, but is {shortened(repr(step))}; the checkpoint is "
            "damaged, but an earlier one may be intact"
        )
    return values


def newest_checkpoint(
    root: Path,
    command: Command,
    above: int = 0,
    passed_over: Collection[str] = (),
    instead: Checkpoint | None = None,
) -> Checkpoint | None:
    """Return the newest undamaged checkpoint of a run, or `instead` if there is none.

    Damaged checkpoints are skipped with a warning.

    root: the folder that contains the run's checkpoints.
    command: the command that continues from the checkpoint.
    above: only checkpoints of steps after this step are considered.
    passed_over: folders of checkpoints that are known to be damaged.
    instead: checkpoint to return if no other is found, or None.

    Raises UserError if a checkpoint belongs to another command or cannot be read. Raises DamagedCheckpoint if
    there are only damaged checkpoints and `instead` is None, because a silent new start would waste the
    training.
    """
    if not is_absent(root):
        with reading(root):
            os.listdir(root)  # raises if the folder cannot be read; glob would treat it as empty
    damaged = 0
    for folder in reversed(folders(root)):
        if step_of(folder) <= above:
            break
        if str(folder) not in passed_over:
            try:
                return open_checkpoint(folder, command)
            except DamagedCheckpoint as error:
                logger.warning(f"skipped a checkpoint: {error}")
        damaged += 1
    if damaged and instead is None:
        raise DamagedCheckpoint(
            f"{root} contains only damaged checkpoints ({damaged}); set run.resume=none to start from the "
            "beginning, which renames this run's folder and keeps the checkpoints"
        )
    return instead


def finished_result(config: Config, command: Command) -> dict[str, Any] | None:
    """Return the content of result.json if this run has already made all its steps; otherwise None.

    If there is a result, the caller has nothing to do. The log then says how to continue the run with more
    steps. The result is None if run.resume is not `auto`, because the run then starts anew or from a chosen
    checkpoint.

    Raises UserError if result.json cannot be read, or if the finished run belongs to another command.
    """
    path = Path(config.run.root, config.run.name, RESULT).absolute()
    if config.run.resume != AUTO or is_absent(path):
        return None
    result = read_object(path)
    step, wanted = result.get("step"), config.run.total_steps
    if type(step) is not int or step < wanted:
        return None
    by = result.get("command", command)  # earlier versions did not write this key
    if by != command:
        raise UserError(
            f"{path.parent} is a finished run of `{by}`, not of `{command}`; choose another run.name, or set "
            "run.resume=none, which renames the finished run"
        )
    logger.info(
        f"the run in {path.parent} is finished: it made {step} of {wanted} steps. Raise run.total_steps "
        "to continue it, or set run.resume=none to start a new one"
    )
    return result


def as_saved(config: Config) -> dict[str, Any]:
    """Return the configuration as JSON values, in the form that it has in a checkpoint's state.json.

    So it can be compared with the configuration of a checkpoint.
    """
    return json.loads(json_text(plain(config)))


def differences(checkpoint: Checkpoint, config: Config) -> list[str]:
    """Return one line of text for each configuration key whose value has changed since the checkpoint.

    The line names the key, its new value and its old value. The key run.resume is left out, and so are keys
    that the checkpoint does not have.
    """
    saved, now = (
        {".".join(names): value for names, value in leaves(values)}
        for values in (checkpoint.state["config"], as_saved(config))
    )
    changed = [key for key in now if key != "run.resume" and key in saved and saved[key] != now[key]]
    return [
        f"{key} is {shortened(now[key])}, but was {shortened(saved[key])} in {checkpoint}" for key in changed
    ]
