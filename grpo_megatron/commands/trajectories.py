"""`grpo-megatron trajectories`: one HTML page with the trajectories of a step."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from grpo_megatron.batch.arrays import read
from grpo_megatron.batch.sample import Group, Sample
from grpo_megatron.config.monitor import MonitorConfig
from grpo_megatron.config.yaml_reader import read_yaml
from grpo_megatron.errors import UserError
from grpo_megatron.files import writing
from grpo_megatron.monitoring.report.read import CONFIG, RecordedRun, read_run
from grpo_megatron.monitoring.report.trees import MOST_TRAJECTORIES, trees_page
from grpo_megatron.monitoring.trajectories import TrajectoryOfStep
from grpo_megatron.rollout.recording.replay import Replay
from grpo_megatron.rollout.shown_trajectories import TracedSequence, TreePainter, within_limit


@dataclass(frozen=True)
class _Wanted:
    """The trajectories that a page shows. None: all.

    prompt: uid of the prompt
    sample: id of the trajectory
    """

    prompt: int | None
    sample: int | None

    def has(self, prompt: int, sample: int) -> bool:
        return self.prompt in (None, prompt) and self.sample in (None, sample)


def trajectories(
    folder: str,
    step: int | None,
    prompt: int | None,
    sample: int | None,
    recording: str | None,
    model: str | None,
    out: str | None,
) -> int:
    """Write an HTML page with the trajectories of a step, print its path, return exit status 0.

    If the run has recorded the step (rollout.record), these are all trajectories, else those that the run
    keeps for its report.

    folder: the run's folder.
    step: index of the step; None: the last one that has trajectories.
    prompt: uid of the only prompt to show; None: all.
    sample: id of the only trajectory to show; None: all.
    recording: path of the recording; None: the run's rollout.record.
    model: folder of a model with the run's tokenizer; None: the run's model.path.
    out: path of the page; None: trajectories_STEP.html in the run's folder.

    Raises UserError if the run or its recording cannot be read, or if nothing is to show.
    """
    run, wanted = read_run(folder), _Wanted(prompt, sample)
    values = _settings(run)
    path = recording or values.get("rollout", {}).get("record")
    replay = _opened(path) if path else None
    steps = sorted({one.step for one in run.trajectories} | set(replay.steps if replay else ()))
    if not steps:
        raise UserError(
            f"{folder} has no trajectories; a run keeps some with monitor.samples_every, and all with "
            "rollout.record"
        )
    step = steps[-1] if step is None else step
    kept = [
        one for one in run.trajectories if one.step == step and wanted.has(one.shown.prompt, one.shown.sample)
    ]
    shown, left_out = kept, 0
    if replay and step in replay.steps:
        painter = TreePainter(_decoder(model or values.get("model", {}).get("path", "")), _characters(values))
        shown, left_out = _recorded(painter, step, replay.read(step), wanted, kept)
        note = f"All trajectories of the recording {path}. {_KEPT_NOTE}"
    else:
        note = "The trajectories that the run has kept. A run with rollout.record keeps all."
    if not shown:
        raise UserError(f"{folder} has no such trajectory; it has trajectories of {_listed(steps)}")
    page = Path(out) if out else Path(folder, f"trajectories_{step:08d}.html")
    with writing(page):
        text = trees_page(f"{run.name}, step {step}", run, note, shown, left_out)
        page.write_text(text, encoding="utf-8", errors="backslashreplace")
    print(page)
    return 0


_KEPT_NOTE = "Log-probs of the trainer are known of those that the run has kept for its report."


def _opened(path: str) -> Replay:
    """Open a recording. Raises UserError if that is not possible."""
    try:
        return Replay(path)
    except UserError as error:
        raise UserError(f"{error}; or name the recording by --recording") from error


def _settings(run: RecordedRun) -> dict[str, Any]:
    """Return the run's configuration as it is in config.yaml, also of earlier versions; {} if it has none."""
    found = read_yaml(run.config, str(run.folder / CONFIG)).value if run.config else {}
    return {name: values for name, values in found.items() if isinstance(values, dict)}


def _characters(values: dict[str, Any]) -> int:
    return values.get("monitor", {}).get("sample_characters") or MonitorConfig().sample_characters


def _decoder(model: str) -> Callable[[np.ndarray], str]:
    """Return a function that converts token ids to text.

    Raises UserError if the folder `model` has no tokenizer.
    """
    from grpo_megatron.data.model_tokenizer import load_tokenizer

    try:
        tokenizer = load_tokenizer(model)
    except UserError as error:
        raise UserError(f"{error}; or name a folder with the run's tokenizer by --model") from error
    return lambda ids: tokenizer.decode(ids.tolist())


def _recorded(
    painter: TreePainter, step: int, groups: list[Group], wanted: _Wanted, kept: list[TrajectoryOfStep]
) -> tuple[list[TrajectoryOfStep], int]:
    """Return (recorded trajectories as a page shows them, number of further ones).

    kept: trajectories that the run has kept, which replace the same ones of the recording.
    """
    known = {one.shown.sample: one for one in kept}
    chosen = [
        (group, sequences)
        for group in groups
        for sequences in group.trajectories
        if wanted.has(group.prompt.uid, sequences[0].trajectory_id)
    ]
    shown = [
        known.get(sequences[0].trajectory_id) or _painted(painter, step, group, sequences)
        for group, sequences in islice(chosen, MOST_TRAJECTORIES)
    ]
    return shown, len(chosen) - len(shown)


def _painted(
    painter: TreePainter, step: int, group: Group, sequences: tuple[Sample, ...]
) -> TrajectoryOfStep:
    own = sequences[: within_limit(sequences)]
    arrays = read([sample.handle for sample in own])
    traced = [TracedSequence.of_sample(*both) for both in zip(own, arrays, strict=True)]
    return TrajectoryOfStep(step, painter.trajectory(group, traced, [], len(sequences) - len(own)))


def _listed(steps: list[int]) -> str:
    """Return the steps as text, at most ten of them."""
    shown = ", ".join(map(str, steps[-10:]))
    return f"the steps {shown}" if len(steps) <= 10 else f"{len(steps)} steps, the last of them {shown}"
