"""Runs with trajectories in their texts.jsonl, for tests of the pages that show these."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np

from grpo_megatron.batch.prompt import Prompt
from grpo_megatron.batch.sample import Group, Sample, WeightSpan
from grpo_megatron.monitoring.trajectories import ShownTrajectory
from grpo_megatron.rollout.shown_trajectories import TracedSequence, TreePainter
from grpo_megatron.rollout.trajectory import Episode, Trajectory
from grpo_megatron.sglang.request import Completion


def ids_of(text: str) -> list[int]:
    """Return a token id for each character of a text."""
    return [ord(character) for character in text]


def decode(ids: np.ndarray) -> str:
    return "".join(map(chr, ids.tolist()))


class Talk:
    """A trajectory whose tokens are characters.

    prompt: text of the prompt
    """

    def __init__(self, prompt: str = "What is 2+3?", trajectory_id: int = 12, uid: int = 105):
        self.group = Group(6, Prompt(uid, np.array(ids_of(prompt), np.int32), prompt, "5"), ())
        self._trajectory = Trajectory(Episode(self.group.prompt, 6, trajectory_id, 10**7, (0, 0)))

    def turn(self, read: str, written: str, version: int = 3) -> "Talk":
        """Add a turn. read: the whole text that the model reads before it."""
        ids = np.array(ids_of(written), np.int32)
        logprobs = -np.arange(1, len(ids) + 1, dtype=np.float32)
        spans = (WeightSpan(version, 0, len(ids)),)
        known = self._trajectory.known(ids_of(read))
        self._trajectory.add(ids_of(read), Completion((0, 0), ids, logprobs, "stop", spans), known)
        return self

    def samples(self, reward: float | None = 1.0) -> tuple[Sample, ...]:
        samples = self._trajectory.samples("stop")
        return tuple(one.scored(reward, {"format": 0.5, "<b>": 1.0}) for one in samples)

    def shown(self, reward: float | None = 1.0, gap: float | None = 0.25, **options) -> ShownTrajectory:
        """Return the trajectory as the report shows it.

        gap: difference of the log-probs of trainer and engine in the last token of each sequence; None: the
            trainer's log-probs are not known.
        options: fields of TreePainter.
        """
        samples = self.samples(reward)
        traced = [TracedSequence.of_sample(one, one.arrays) for one in samples]
        if gap is not None:
            traced = [replace(one, trainer=one.engine - gap * _last(one.engine)) for one in traced]
        painter = TreePainter(**{"decode": decode, "characters": 4000, "version": 4, **options})
        return painter.trajectory(replace(self.group, samples=samples), traced, ["best reward"])


def _last(values: np.ndarray) -> np.ndarray:
    return np.append(np.zeros(len(values) - 1, np.float32), np.float32(1))


def run_with(folder: Path, *shown: tuple[int, ShownTrajectory]) -> Path:
    """Write the files of a run. shown: (step, trajectory)."""
    folder.mkdir(exist_ok=True)
    (folder / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 0.5}\n')
    rows = [{"step": step, "trajectory": one.row()} for step, one in shown]
    (folder / "texts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder
