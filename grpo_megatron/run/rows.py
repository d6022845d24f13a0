"""Files of one JSON object a line, which a run appends to."""

import json
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any


class Rows:
    """What a full disk does not take waits for the next row, so that the run goes on, and the file has whole rows alone."""

    def __init__(self, path: Path, say: Callable[[str], None]):
        self._path, self._say = path, say
        self._waiting: list[str] = []

    def write(self, row: dict[str, Any]) -> None:
        self._waiting.append(json.dumps(row) + "\n")
        size = self._path.stat().st_size if self._path.exists() else 0
        try:
            with open(self._path, "a", encoding="utf-8") as file:
                file.writelines(self._waiting)
        except OSError as error:
            with suppress(OSError):
                os.truncate(self._path, size)
            if len(self._waiting) == 1:
                self._say(f"{self._path} could not be written ({error.strerror}); its rows wait until they can be")
        else:
            self._waiting.clear()
