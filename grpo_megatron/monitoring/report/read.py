"""Reader of the files that a run has written to its folder."""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_megatron.errors import UserError
from grpo_megatron.files import float_or_nan
from grpo_megatron.monitoring.run_files import METRICS, TEXTS, read_metrics, read_texts
from grpo_megatron.monitoring.timeline import TIMELINE, read_timeline
from grpo_megatron.monitoring.trajectories import TrajectoryOfStep, trajectories_of
from grpo_megatron.paths import file_problem, folder_problem, is_absent

logger = logging.getLogger(__name__)

CONFIG, REPORT = "config.yaml", "report.html"

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
    trajectories: list[TrajectoryOfStep]
    """Trajectories that the run has kept, in the order of the steps. Earlier versions kept none."""
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

    Damaged lines of metrics.jsonl are left out, and a warning says how many there are. Raises UserError if
    the folder has no metrics.jsonl, or if the file cannot be read.
    """
    problem = folder_problem(folder)
    if problem:
        raise UserError(f"{folder} {problem}; it must be the folder of a run")
    path = Path(folder)
    if is_absent(path / METRICS):
        raise UserError(f"{folder} contains no {METRICS}, so it is not the folder of a run; check the path")
    config = path / CONFIG
    rows = read_texts(path / TEXTS) if not file_problem(path / TEXTS) else []
    return RecordedRun(
        folder=path,
        curves=_curves(path / METRICS),
        texts=[row for row in rows if "text" in row],
        trajectories=trajectories_of(rows),
        config=config.read_text(encoding="utf-8", errors="replace") if not file_problem(config) else None,
        timeline=read_timeline(path / TIMELINE) if not file_problem(path / TIMELINE) else [],
    )


def _curves(path: Path) -> dict[str, Curve]:
    """Read metrics.jsonl. Return {name of a scalar: list of (step, value)}."""
    rows, damaged = read_metrics(path)
    if damaged:
        logger.warning(f"{path}: damaged lines are left out ({damaged})")
    found: dict[str, dict[int, float]] = {}
    for _, row in rows:
        step = row.pop("step")
        for name, value in row.items():
            found.setdefault(name, {})[step] = float(float_or_nan(value))
    return {name: sorted(points.items()) for name, points in found.items()}
