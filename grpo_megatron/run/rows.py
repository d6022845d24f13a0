"""Files with one JSON object per line, which a run appends to."""

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

from grpo_megatron.json_files import json_text
from grpo_megatron.monitoring.row_file import RowFile


class Rows:
    """A file of JSON rows, such as trained.jsonl. A full disk neither ends the run nor loses a row.

    A row that cannot be written is kept in memory, and written together with the next one. The file contains
    only whole rows.
    """

    def __init__(self, path: Path, say: Callable[[str], None]):
        self._path, self._say = path, say
        self._waiting: list[str] = []

    def write(self, row: dict[str, Any]) -> None:
        self._waiting.append(json_text(row) + "\n")
        try:
            with closing(RowFile(self._path)) as file:
                file.append("".join(self._waiting))
        except OSError as error:
            if len(self._waiting) == 1:
                self._say(
                    f"{self._path} could not be written ({error.strerror}); its rows wait until they can be"
                )
        else:
            self._waiting.clear()
