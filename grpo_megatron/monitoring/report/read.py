"""Reader of the files that a run has written to its folder."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_megatron.errors import UserError, shortened
from grpo_megatron.files import float_or_nan, parse_object
from grpo_megatron.monitoring.run_files import METRICS, TEXTS, read_texts
from grpo_megatron.monitoring.timeline import TIMELINE, read_timeline
from grpo_megatron.paths import file_problem, folder_problem, is_absent

CONFIG = "config.yaml"

# (step, value) in the order of the steps.
Curve = list[tuple[int, float]]


@dataclass(frozen=True)
class RecordedRun:
    """Metrics, texts, configuration and timeline that a run has recorded in its folder."""

    folder: Path
    """The run's folder."""
    curves: dict[str, Curve]
    """{name of a scalar: list of (step, value)}. If a step was written several times, the last value counts.
    A value that is null in the file is NaN."""
    texts: list[dict[str, Any]]
    """Texts that the run has logged, such as samples, as dicts with "step", "name" and "text"."""
    config: str | None
    """The resolved configuration as YAML; None if the folder has no config.yaml."""
    timeline: list[dict[str, Any]]
    """Events of timeline.json, in the Trace Event Format."""

    @property
    def name(self) -> str:
        return self.folder.resolve().name

    @property
    def steps(self) -> int:
        """Index of the last recorded step, from 1; 0 if no step was recorded."""
        return max((curve[-1][0] for curve in self.curves.values()), default=0)


def read_run(folder: str) -> RecordedRun:
    """Read the metrics, texts, configuration and timeline that a run has recorded in its folder.

    Raises UserError if the folder has no metrics.jsonl, or if a row of that file is damaged. An incomplete
    last row is ignored, because the run may have been killed while it wrote the row.
    """
    problem = folder_problem(folder)
    if problem:
        raise UserError(f"{folder} {problem}; it must be the folder of a run")
    path = Path(folder)
    if is_absent(path / METRICS):
        raise UserError(f"{folder} contains no {METRICS}, so it is not the folder of a run; check the path")
    if file_problem(path / METRICS):
        raise UserError(f"{path / METRICS} {file_problem(path / METRICS)}")
    config = path / CONFIG
    return RecordedRun(
        folder=path,
        curves=_curves(path / METRICS),
        texts=read_texts(path / TEXTS) if not file_problem(path / TEXTS) else [],
        config=config.read_text(encoding="utf-8", errors="replace") if not file_problem(config) else None,
        timeline=read_timeline(path / TIMELINE) if not file_problem(path / TIMELINE) else [],
    )


def _curves(path: Path) -> dict[str, Curve]:
    """Read metrics.jsonl. Return {name of a scalar: list of (step, value)}.

    Raises UserError for a damaged row.
    """
    found: dict[str, dict[int, float]] = {}
    rows = path.read_bytes().splitlines(keepends=True)
    for line, raw in enumerate(rows, start=1):
        if line == len(rows) and not raw.endswith(b"\n"):
            break
        row = parse_object(raw, f"{path}:{line}")
        step = row.pop("step", None)
        if type(step) is not int:
            raise UserError(
                f"{path}:{line}: step must be an integer, but is {shortened(repr(step))}; correct or remove "
                "the line"
            )
        for name, value in row.items():
            if type(value) not in (int, float) and value is not None:
                raise UserError(
                    f"{path}:{line}: {shortened(name)} must be a number, but is {shortened(repr(value))}; "
                    "correct or remove the line"
                )
            found.setdefault(name, {})[step] = float(float_or_nan(value))
    return {name: sorted(points.items()) for name, points in found.items()}
