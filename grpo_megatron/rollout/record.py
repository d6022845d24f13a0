"""Recordings of rollouts: files with the groups of each step as a line of JSON, for training on them again.

The format is JSON and not pickle, so that loading a recording runs no code. float32 log-probs survive
exactly, because they are written as float64, whose shortest decimal form reads back the same.
"""

import json
import logging
import mmap
import os
import re
from dataclasses import asdict
from pathlib import Path

import numpy as np

from grpo_megatron.batch.arrays import reading
from grpo_megatron.batch.prompt import Prompt
from grpo_megatron.batch.sample import Group, Sample, WeightSpan
from grpo_megatron.errors import UserError
from grpo_megatron.files import RowFile, json_text, not_written, numbered
from grpo_megatron.paths import file_problem, is_absent, output_file_problem

logger = logging.getLogger(__name__)

_FORMAT = {"format": "grpo_megatron.rollout", "version": 1}
_HEADER = json_text(_FORMAT) + "\n"
# A row may have gigabytes. So only its two ends are parsed to find its step, and whether it is complete.
_BEGINNING, _END = re.compile(rb'\{\s*"step"\s*:\s*(\d{1,18})\s*,'), re.compile(rb"\]\s*\}\s*$")
_LONGEST = 100  # maximum number of bytes of a header, and of a match of these expressions


class Recorder:
    """Writes a recording (rollout.record): a file with the groups of each training step.

    path: path of the file.
    resumed: step of the checkpoint that a resumed run continues from. Steps that were recorded after this
        step are removed from the file. 0 for a new run: an earlier recording is renamed to PATH.1, PATH.2 or
        the like.

    Raises UserError if the file at `path` is not a recording.
    """

    def __init__(self, path: str, resumed: int = 0):
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        must_be_free(path)
        if not resumed and os.path.exists(path) and os.path.getsize(path) > len(_HEADER):
            logger.info(f"moved the earlier recording {path} to {Path(path).rename(numbered(Path(path)))}")
        kept = _end_of(path, resumed) if os.path.exists(path) else 0
        self._file = RowFile(path)
        os.truncate(path, kept)
        if not kept:
            self._file.append(_HEADER)

    def write(self, step: int, groups: list[Group]) -> None:
        """Append the groups of a step to the file.

        If the file cannot be written, for example because the disk is full, the recording lacks this step. A
        warning is logged, and the run goes on.
        """
        try:
            with reading(allowed=True):  # a recording takes the tokens through the driver
                self._file.append_row({"step": step, "groups": [_group_to_json(group) for group in groups]})
        except OSError as error:
            logger.warning(
                not_written(
                    self._file.path,
                    error,
                    f"step {step} is missing from the recording, and the run continues",
                )
            )

    def close(self) -> None:
        self._file.close()


class Replay:
    """Reads a recording (rollout.replay). The groups of a step are loaded only when they are requested.

    An incomplete last line of the file is ignored, because a killed run may have left it there.
    """

    def __init__(self, path: str):
        """Open the recording at `path`, and find the row of each step in the file.

        Raises UserError if the file is not a recording, if a row is damaged, or if two rows have the same
        step.
        """
        if file_problem(path):
            raise UserError(f"rollout.replay: {path} {file_problem(path)}")
        self._path = path
        # {step: (start of its row, length of its row)}, in bytes
        self._places: dict[int, tuple[int, int]] = {}
        with open(path, "rb") as file:
            header = file.readline(_LONGEST)
            if not _is_header(header):
                raise UserError(
                    f"rollout.replay: {path} is not a recording that this version can read; record the "
                    "samples again with rollout.record"
                )
            place = len(header)
            for line, row in enumerate(file, start=2):
                if not row.endswith(b"\n"):
                    break
                step = _step_of(row)
                if step is None or not _END.search(row[-_LONGEST:]):
                    raise UserError(
                        f"rollout.replay: {path}:{line} is damaged; copy the recording again, or record the "
                        "samples again"
                    )
                if step in self._places:
                    raise UserError(
                        f"rollout.replay: {path}:{line}: step {step} occurs a second time; remove the "
                        "duplicate, or record the samples again"
                    )
                self._places[step] = place, len(row)
                place += len(row)

    def read(self, step: int) -> list[Group]:
        """Return the groups of a step. Raises UserError if the step is missing or damaged.

        step: index of the training step, from 1.
        """
        if step not in self._places:
            raise UserError(
                f"rollout.replay: {self._path} contains {len(self._places)} steps, but not step {step}; "
                "lower run.total_steps"
            )
        place, length = self._places[step]
        with open(self._path, "rb") as file:
            file.seek(place)
            row = file.read(length)
        try:
            return [_group_from_json(group) for group in json.loads(row)["groups"]]
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            raise UserError(
                f"rollout.replay: {self._path}: step {step} is damaged ({type(error).__name__}: {error}); "
                "record the samples again"
            ) from error


def must_be_free(path: str) -> None:
    """Check that a recording can be written to this path. Raises UserError if not.

    An existing file is accepted only if it is a recording. Another file, such as a data file that is named in
    rollout.record by mistake, would be overwritten. The folder must be writable.
    """
    if problem := output_file_problem(path):
        raise UserError(f"rollout.record: {path} {problem}")
    if is_absent(path):
        return
    with open(path, "rb") as file:
        found = file.read(len(_HEADER))
    if found != _HEADER.encode()[: len(found)]:
        raise UserError(
            f"rollout.record: {path} is not a recording, and the run would overwrite it; move the file "
            "away, or choose another path"
        )


def _is_header(line: bytes) -> bool:
    try:
        return json.loads(line) == _FORMAT
    except ValueError:
        return False


def _step_of(row: bytes) -> int | None:
    """Return the step that a row of a recording belongs to, or None if the row is damaged.

    row: the row, or only its beginning.
    """
    found = _BEGINNING.match(row)
    return int(found[1]) if found else None


def _end_of(path: str, last: int) -> int:
    """Return the size in bytes of the part of a recording that ends with step `last`: header and rows.

    The result is 0 if the file does not have a complete header. The search starts at the end of the file, so
    that most of this part, which may have many gigabytes, is not read.
    """
    if not os.path.getsize(path):
        return 0
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as view:
        end = view.rfind(b"\n") + 1
        while start := view.rfind(b"\n", 0, end - 1) + 1:
            step = _step_of(view[start : start + _LONGEST])
            if step is not None and step <= last:
                break
            end = start
        return end


def _group_to_json(group: Group) -> dict:
    """Convert a group to values that JSON can represent.

    A sample's prompt_ids are omitted if they equal the ids of the group's prompt.
    """
    samples = []
    for sample in group.samples:
        item, arrays = dict(vars(sample)), sample.arrays
        for name in ("handle", "num_prompt", "num_response", "num_trained"):
            del item[name]
        if not np.array_equal(arrays.prompt_ids, group.prompt.ids):
            item["prompt_ids"] = arrays.prompt_ids.tolist()
        for name in ("response_ids", "loss_mask", "rollout_logprobs"):
            item[name] = getattr(arrays, name).tolist()
        item["weight_spans"] = [asdict(span) for span in sample.weight_spans]
        item["routing"] = None if arrays.routing is None else arrays.routing.tolist()
        samples.append(item)
    prompt = {**vars(group.prompt), "ids": group.prompt.ids.tolist()}
    return {"group_id": group.group_id, "prompt": prompt, "samples": samples, "failed": group.failed}


def _group_from_json(item: dict) -> Group:
    prompt = Prompt(**{**item["prompt"], "ids": np.array(item["prompt"]["ids"], dtype=np.int32)})
    samples = []
    for values in item["samples"]:
        arrays = {
            "prompt_ids": np.array(values["prompt_ids"], dtype=np.int32)
            if "prompt_ids" in values
            else prompt.ids,
            "response_ids": np.array(values["response_ids"], dtype=np.int32),
            "loss_mask": np.array(values["loss_mask"], dtype=np.bool_),
            "rollout_logprobs": np.array(values["rollout_logprobs"], dtype=np.float32),
        }
        if values.get("routing") is not None:
            arrays["routing"] = np.array(values["routing"], dtype=np.int16)
        spans = tuple(WeightSpan(**span) for span in values["weight_spans"])
        samples.append(Sample.of(**{**values, **arrays, "weight_spans": spans}))
    return Group(item["group_id"], prompt, tuple(samples), item.get("failed", 0))
