"""The files metrics.jsonl and texts.jsonl in the run's folder, for the report and other programs."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from grpo_megatron.errors import UserError
from grpo_megatron.files import RowFile, json_text, parse_object, reading, replace_text
from grpo_megatron.monitoring.trajectories import ShownTrajectory
from grpo_megatron.paths import file_problem

METRICS = "metrics.jsonl"
TEXTS = "texts.jsonl"


class RunFiles:
    """A Listener that writes scalars to metrics.jsonl and texts to texts.jsonl, in the run's folder.

    A row of metrics.jsonl is {"step": 3, NAME: number, ..}. A row of texts.jsonl is {"step": 3, "name": ..,
    "text": ..}, or {"step": 3, "trajectory": {..}} with the fields of ShownTrajectory.
    """

    def __init__(self, directory: str, resumed: int = 0):
        """Open the files. Remove the texts of steps after `resumed`, because the run repeats these steps.

        The rows of such steps in metrics.jsonl have been removed by run.folder.rewind_folder.

        directory: the run's folder
        resumed: step of the checkpoint that the run continues from; 0 for a new run
        """
        texts = Path(directory, TEXTS)
        if texts.exists():
            replace_text(
                texts, "".join(json_text(row) + "\n" for row in read_texts(texts) if row["step"] <= resumed)
            )
        self._metrics, self._texts = RowFile(Path(directory, METRICS)), RowFile(texts)

    def scalars(self, step: int, values: dict[str, float]) -> None:
        self._metrics.append_row({"step": step, **values})

    def histogram(self, step: int, name: str, values: np.ndarray) -> None:
        """Do nothing, because metrics.jsonl and texts.jsonl contain no histograms."""

    def text(self, step: int, name: str, text: str) -> None:
        self._texts.append_row({"step": step, "name": name, "text": text})

    def trajectory(self, step: int, shown: ShownTrajectory) -> None:
        self._texts.append_row({"step": step, "trajectory": shown.row()})

    def close(self) -> None:
        self._metrics.close()
        self._texts.close()


def read_metrics(path: Path) -> tuple[list[tuple[str, dict[str, Any]]], int]:
    """Read metrics.jsonl. Return (rows, number of damaged lines).

    The rows are a list of (line, row): the text of the line with its newline, and its values as {"step": ..,
    NAME: number or null}. Damaged lines, which have something else, are left out: after the failure of a
    node, the file may end with NUL bytes. Half a row at the end is left out too and not counted, because the
    run may be writing it, or may have been killed while it did.

    Raises UserError if the file cannot be read.
    """
    if problem := file_problem(path):
        raise UserError(f"{path} {problem}")
    with reading(path):
        lines = path.read_bytes().splitlines(keepends=True)
    if lines and not lines[-1].endswith(b"\n"):
        lines.pop()
    rows = []
    for line in lines:
        try:
            row = parse_object(line, str(path))
        except UserError:
            continue
        numbers = all(value is None or type(value) in (int, float) for value in row.values())
        if type(row.get("step")) is int and numbers:
            rows.append((line.decode("utf-8"), row))
    return rows, len(lines) - len(rows)


def read_texts(path: Path) -> list[dict[str, Any]]:
    """Return the rows of texts.jsonl: {"step", "name", "text"} or {"step", "trajectory"}, see RunFiles.

    Damaged rows are left out. A killed run may have left half a row.
    """
    kinds = [{"step": int, "name": str, "text": str}, {"step": int, "trajectory": dict}]
    rows = []
    for line in path.read_text(encoding="utf-8", errors="replace").split("\n"):
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict) and {key: type(value) for key, value in row.items()} in kinds:
            rows.append(row)
    return rows
