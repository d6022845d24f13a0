"""Recordings of earlier versions: a file of JSON lines, each with a step's groups and all their tokens."""

import json
import re
from typing import Any

import numpy as np

from grpo_megatron.batch.prompt import Prompt
from grpo_megatron.batch.sample import Group, Sample
from grpo_megatron.errors import UserError
from grpo_megatron.rollout.recording.rows import group_of

_FORMAT = {"format": "grpo_megatron.rollout", "version": 1}
# A row may have gigabytes. So only its two ends are parsed to find its step, and whether it is complete.
_BEGINNING, _END = re.compile(rb'\{\s*"step"\s*:\s*(\d{1,18})\s*,'), re.compile(rb"\]\s*\}\s*$")
_LONGEST = 100  # maximum number of bytes of a header, and of a match of these expressions
_ARRAYS = {"response_ids": np.int32, "loss_mask": np.bool_, "rollout_logprobs": np.float32}


def is_of_lines(path: str) -> bool:
    """Return True if a file is a recording in the format of earlier versions, which is lines of JSON."""
    with open(path, "rb") as file:
        try:
            return json.loads(file.readline(_LONGEST)) == _FORMAT
        except ValueError:
            return False


class LineRecording:
    """Reads a recording of an earlier version, a file of JSON lines.

    A last line that a killed run left incomplete is ignored.

    steps: the recorded steps, in order
    """

    def __init__(self, path: str):
        """Find the place of each step's row (line) in the recording.

        Raises UserError if a row is damaged, or if two rows have the same step.
        """
        self._path = path
        # {step: (start of its row, length of its row)}, in bytes
        self._places: dict[int, tuple[int, int]] = {}
        with open(path, "rb") as file:
            place = len(file.readline(_LONGEST))
            for line, row in enumerate(file, start=2):
                if not row.endswith(b"\n"):
                    break
                found = _BEGINNING.match(row)
                if not found or not _END.search(row[-_LONGEST:]):
                    raise UserError(
                        f"{path}:{line} is damaged; copy the recording again, or record the samples again"
                    )
                if int(found[1]) in self._places:
                    raise UserError(
                        f"{path}:{line}: step {int(found[1])} occurs a second time; remove the duplicate, or "
                        "record the samples again"
                    )
                self._places[int(found[1])] = place, len(row)
                place += len(row)
        self.steps = sorted(self._places)

    def read(self, step: int) -> list[Group]:
        """Return the groups of a recorded step. The arrays of the samples are in memory.

        Raises KeyError, TypeError, ValueError or RecursionError if the step's row is damaged.
        """
        place, length = self._places[step]
        with open(self._path, "rb") as file:
            file.seek(place)
            row = json.loads(file.read(length))
        return [group_of(group, _sample) for group in row["groups"]]


def _sample(prompt: Prompt, row: dict[str, Any]) -> Sample:
    arrays = {name: np.array(row[name], dtype=dtype) for name, dtype in _ARRAYS.items()}
    arrays["prompt_ids"] = np.array(row["prompt_ids"], dtype=np.int32) if "prompt_ids" in row else prompt.ids
    if row.get("routing") is not None:
        arrays["routing"] = np.array(row["routing"], dtype=np.int16)
    return Sample.of(**{**row, **arrays})
