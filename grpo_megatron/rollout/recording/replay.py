"""Replay: reads recordings, those of this version and those of earlier ones."""

import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

from grpo_megatron.batch.prompt import Prompt
from grpo_megatron.batch.sample import Group, Sample
from grpo_megatron.errors import UserError
from grpo_megatron.files import read_object
from grpo_megatron.paths import file_problem, folder_problem
from grpo_megatron.rollout.recording.arrays import RecordedArrays, RecordedTexts
from grpo_megatron.rollout.recording.files import (
    has_header,
    recorded_steps,
    rows_file,
    steps_without_arrays,
)
from grpo_megatron.rollout.recording.lines import LineRecording, is_of_lines
from grpo_megatron.rollout.recording.rows import group_of


class Replay:
    """Reads a recording (rollout.replay). The groups of a step are loaded only when they are requested.

    steps: the recorded steps, in order
    """

    def __init__(self, path: str):
        """Open the recording at `path`. Raises UserError if it is not a recording or is damaged."""
        is_folder = os.path.isdir(path)
        if problem := (folder_problem if is_folder else file_problem)(path):
            raise UserError(f"the recording {path} {problem}")
        if not (has_header(Path(path)) if is_folder else is_of_lines(path)):
            raise UserError(
                f"{path} is not a recording that this version can read; record the samples again with "
                "rollout.record"
            )
        self._path = path
        self._recording = _FolderRecording(path) if is_folder else LineRecording(path)
        self.steps = self._recording.steps

    def read(self, step: int) -> list[Group]:
        """Return the recorded groups of a step.

        Arrays and texts of the samples stay in files, unless the recording is of an earlier version.

        step: index of the training step, from 1.

        Raises UserError if the step is missing or damaged.
        """
        if step not in self.steps:
            raise UserError(
                f"{self._path} contains {len(self.steps)} steps, but not step {step}; lower run.total_steps"
            )
        try:
            return self._recording.read(step)
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            raise UserError(
                f"{self._path}: step {step} is damaged ({type(error).__name__}: {error}); record the samples "
                "again"
            ) from error


class _FolderRecording:
    """Reads the rows of a recording in the present format, which is a folder.

    It has the same interface as LineRecording, which reads recordings of earlier versions. The constructor
    raises UserError if a step has no file with arrays.
    """

    def __init__(self, path: str):
        self._folder = Path(path).absolute()  # other processes may have another working directory
        self.steps = recorded_steps(self._folder)
        if missing := steps_without_arrays(self._folder):
            raise UserError(f"{path} lacks the tokens of step {missing[0]}; copy the recording again")

    def read(self, step: int) -> list[Group]:
        rows = read_object(rows_file(self._folder, step))
        return [group_of(row, partial(_sample, self._folder)) for row in rows["groups"]]


def _sample(folder: Path, prompt: Prompt, row: dict[str, Any]) -> Sample:
    where = row.pop("arrays")
    # The samples of a file share its name, which is then sent to the ranks once.
    file, index = sys.intern(str(folder / where["file"])), where["index"]
    return Sample(handle=RecordedArrays(file, index), texts=RecordedTexts(file, index), **row)
