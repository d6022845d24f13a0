"""Names of the files of a recording, and its header."""

import re
from pathlib import Path

from grpo_megatron.files import json_text, read_object, replace_text
from grpo_megatron.paths import is_absent

_HEADER = "recording.json"
_FORMAT = {"format": "grpo_megatron.rollout", "version": 2}
_ROWS = re.compile(r"step_(\d{1,18})\.json")
_ARRAYS = re.compile(r"step_(\d{1,18})_worker\d+\.safetensors")
_PART = re.compile(r"step_(\d{1,18})(_worker\d+\.safetensors|\.json)(\.tmp)?")


def rows_file(folder: Path, step: int) -> Path:
    """Return the path of a step's file of rows, which describe groups and samples without their arrays.

    The recording in `folder` contains the step if this file exists.
    """
    return folder / f"step_{step:08d}.json"


def arrays_file(folder: Path, step: int, worker: int) -> Path:
    """Return the path of the file with arrays and texts of the samples that a worker made for a step.

    folder: folder of the recording.
    worker: index of the rollout worker.
    """
    return folder / f"step_{step:08d}_worker{worker}.safetensors"


def recorded_steps(folder: Path) -> list[int]:
    """Return the steps that the recording in `folder` contains, in order."""
    return sorted(int(found[1]) for file in folder.iterdir() if (found := _ROWS.fullmatch(file.name)))


def steps_without_arrays(folder: Path) -> list[int]:
    """Return the steps of a recording without any file of arrays, for example after an incomplete copy."""
    found = (_ARRAYS.fullmatch(file.name) for file in folder.iterdir())
    return sorted(set(recorded_steps(folder)) - {int(name[1]) for name in found if name})


def remove_steps_after(folder: Path, last: int) -> None:
    """Remove the steps after step `last` from a recording, and the files of incompletely recorded steps."""
    for step in recorded_steps(folder):
        if step > last:
            rows_file(folder, step).unlink()
    kept = set(recorded_steps(folder))
    for file in folder.iterdir():
        found = _PART.fullmatch(file.name)
        if found and (found[3] or int(found[1]) not in kept):
            file.unlink()


def has_header(folder: Path) -> bool:
    """Return True if the folder has the header file of a recording in this version's format.

    Raises UserError if the header file exists and cannot be read.
    """
    return not is_absent(folder / _HEADER) and read_object(folder / _HEADER) == _FORMAT


def write_header(folder: Path) -> None:
    replace_text(folder / _HEADER, json_text(_FORMAT) + "\n")
