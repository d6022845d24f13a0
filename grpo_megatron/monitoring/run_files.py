"""metrics.jsonl and texts.jsonl in the run's folder, a row each time."""

import json
from pathlib import Path

import numpy as np

from grpo_megatron.monitoring.row_file import RowFile, rewrite

METRICS = "metrics.jsonl"
TEXTS = "texts.jsonl"


class RunFiles:
    """A Listener. Rows of metrics.jsonl are {"step": 3, NAME: number, ..}, of texts.jsonl {"step": 3, "name": .., "text": ..}."""

    def __init__(self, directory: str, resumed: int = 0):
        """resumed: the step a resumed run continues after; rows of later ones go, with what a killed run left half-written."""
        for name in (METRICS, TEXTS):
            path = Path(directory, name)
            if path.exists():
                rewrite(path, [json.dumps(row) + "\n" for row in _read_rows(path) if row["step"] <= resumed])
        self._metrics, self._texts = RowFile(Path(directory, METRICS)), RowFile(Path(directory, TEXTS))

    def scalars(self, step: int, values: dict[str, float]) -> None:
        self._metrics.append(json.dumps({"step": step, **values}) + "\n")

    def histogram(self, step: int, name: str, values: np.ndarray) -> None:
        """Not kept here."""

    def text(self, step: int, name: str, text: str) -> None:
        self._texts.append(json.dumps({"step": step, "name": name, "text": text}) + "\n")

    def close(self) -> None:
        self._metrics.close()
        self._texts.close()


def read_texts(path: Path) -> list[dict]:
    """The rows of texts.jsonl, without those that a killed run left unfinished."""
    kinds = {"step": int, "name": str, "text": str}
    return [row for row in _read_rows(path) if {key: type(value) for key, value in row.items()} == kinds]


def _read_rows(path: Path) -> list[dict]:
    """The rows that are of a step."""
    rows = []
    for line in path.read_text(encoding="utf-8", errors="replace").split("\n"):
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict) and type(row.get("step")) is int:
            rows.append(row)
    return rows
