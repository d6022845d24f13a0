"""Recorder: writes recordings."""

import logging
import os
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from grpo_megatron.batch.sample import Group, Sample
from grpo_megatron.errors import UserError
from grpo_megatron.files import json_text, not_written, numbered, replace_text, writing
from grpo_megatron.paths import file_problem, is_absent, output_folder_problem
from grpo_megatron.rollout.recording.files import (
    arrays_file,
    has_header,
    recorded_steps,
    remove_steps_after,
    rows_file,
    write_header,
)
from grpo_megatron.rollout.recording.lines import is_of_lines
from grpo_megatron.rollout.recording.rows import group_row

logger = logging.getLogger(__name__)


class SamplesWriter(Protocol):
    """Interface of RolloutManager, as far as Recorder uses it to have arrays and texts of samples written.

    The class itself is not named, because its import takes seconds, and `config check` needs this module.
    """

    def write_samples(self, groups: list[Group], path_of: Callable[[int], Path]) -> list[Group]: ...


class Recorder:
    """Writes a recording (rollout.record): a folder with the groups of each training step.

    The rollout workers write the arrays and texts of their samples themselves, so that this data does not
    pass through the driver.
    """

    def __init__(self, path: str, manager: SamplesWriter, resumed: int = 0):
        """Begin or continue a recording.

        path: path of the folder.
        manager: has arrays and texts written by the processes that hold them.
        resumed: step of the checkpoint that a resumed run continues from. Steps that were recorded after this
            step are removed. 0 for a new run: an earlier recording is renamed to PATH.1, PATH.2 or the like.
            A recording of an earlier version is always renamed.

        Raises UserError if something other than a recording is at the path, or if the folder cannot be
        written.
        """
        self._folder, self._manager = Path(path).absolute(), manager
        must_be_free(path)
        if os.path.isfile(path) or (os.path.isdir(path) and not resumed and recorded_steps(self._folder)):
            logger.info(f"moved the earlier recording {path} to {Path(path).rename(numbered(Path(path)))}")
        with writing(path):
            self._folder.mkdir(parents=True, exist_ok=True)
            if not has_header(self._folder):
                write_header(self._folder)
            remove_steps_after(self._folder, resumed)

    def write(self, step: int, groups: list[Group]) -> None:
        """Write the groups of a training step to the recording.

        If a file cannot be written, for example because the disk is full, a warning is logged, and the
        recording lacks this step. No error is raised.

        Raises UserError if a rollout worker writes to a disk that this process does not see.
        """
        try:
            groups = self._manager.write_samples(groups, partial(arrays_file, self._folder, step))
            for file in {sample.handle.file for group in groups for sample in group.samples}:
                if not os.path.exists(file):
                    raise UserError(
                        f"rollout.record: a rollout worker on another node has written {file}, which does "
                        "not exist on this node; choose a folder on a disk that all nodes share"
                    )
            rows = [group_row(group, [_where(sample) for sample in group.samples]) for group in groups]
            replace_text(rows_file(self._folder, step), json_text({"step": step, "groups": rows}) + "\n")
        except OSError as error:
            with suppress(OSError):  # the folder's disk may be gone
                remove_steps_after(self._folder, step - 1)
            missing = f"step {step} is missing from the recording, and the run continues"
            logger.warning(not_written(self._folder, error, missing))


def _where(sample: Sample) -> dict[str, Any]:
    """Return the entries of a sample's row in a recording that describe the sample's arrays.

    The entries are the counts of tokens and {"arrays": {"file": name of the file, "index": index in it}}.
    """
    lengths = {name: getattr(sample, name) for name in ("num_prompt", "num_response", "num_trained")}
    return {**lengths, "arrays": {"file": Path(sample.handle.file).name, "index": sample.handle.index}}


def must_be_free(path: str) -> None:
    """Check that a recording can be written to this path. Raises UserError if not.

    If the path exists, it must be a recording or an empty folder. Otherwise, for example if rollout.record
    names a wrong folder by mistake, the recording would be mixed up with other files.
    """
    folder, is_file = Path(path).absolute(), os.path.isfile(path)
    if is_file:
        problem = output_folder_problem(folder.parent)
        problem = file_problem(path) or (problem and f"cannot be moved away: {folder.parent} {problem}")
    else:
        problem = output_folder_problem(path)
    if problem:
        raise UserError(f"rollout.record: {path} {problem}")
    if is_absent(path):
        return
    if not (is_of_lines(path) if is_file else has_header(folder) or not os.listdir(folder)):
        raise UserError(f"rollout.record: {path} is not a recording; move it away, or choose another path")
