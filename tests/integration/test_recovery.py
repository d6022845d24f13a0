"""Processes that die under a live run: it goes on from its newest checkpoint, with the processes that still can."""

import contextlib
import os
import signal
import threading
import time

import psutil
import pytest

from grpo_megatron.cli import main
from grpo_megatron.data import EpochOrder
from tests.integration.test_train import arguments, metrics, trained

STEPS = 4


class Killer(threading.Thread):
    """Kills one process of those whose command line has `title`, as soon as the run has logged `step`."""

    def __init__(self, title: str, rows, step: int):
        super().__init__(daemon=True)
        self._title, self._rows, self._step = title, rows, step
        self.killed: int | None = None

    def run(self) -> None:
        while not (self._rows.is_file() and f'{{"step": {self._step},' in self._rows.read_text()):
            time.sleep(0.01)
        self.killed = find(self._title)[-1]
        os.kill(self.killed, signal.SIGKILL)


def find(title: str) -> list[int]:
    """Of the processes that this one started, those with `title` in the command line."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if title in " ".join(process.cmdline()):
                found.append(process.pid)
    return found


class EngineSeen(threading.Thread):
    """Notes all processes of the engines' actors."""

    def __init__(self):
        super().__init__(daemon=True)
        self.seen: set[int] = set()
        self.ended = False

    def run(self) -> None:
        while not self.ended:
            self.seen |= set(find("ray::SGLangEngine"))
            time.sleep(0.2)


@pytest.mark.parametrize(
    ("title", "name", "engines"),
    [
        ("ray::_Worker", "trainer rank", 1),
        pytest.param("sglang::scheduler", "engine 0", 2, marks=pytest.mark.slow),
    ],
)
def test_a_run_outlives_the_death_of_a_process(ray_here, arithmetic, tmp_path, capsys, title, name, engines):
    """engines: how many there are one after the other; a dead rank leaves the engine as it is."""
    killer, watcher = Killer(title, tmp_path / "run" / "metrics.jsonl", 2), EngineSeen()
    for thread in (killer, watcher):
        thread.start()
    changes = [f"run.total_steps={STEPS}", "checkpoint.every=1", "megatron.tensor_parallel=2"]
    assert main(["train", *arguments(arithmetic, tmp_path, *changes)]) == 0
    watcher.ended = True
    assert killer.killed
    said = capsys.readouterr().out
    assert f"{name} " in said
    assert "restart 1 of at most 3, from " in said
    assert [row["step"] for row in metrics(tmp_path, "run")] == list(range(1, STEPS + 1))
    prompts = len((arithmetic / "data" / "train.jsonl").read_text().splitlines())
    assert trained(tmp_path, "run") == EpochOrder(prompts, 1234, True).take(6 * STEPS)
    assert len(watcher.seen) == engines


def test_without_restarts_the_run_ends(ray_here, arithmetic, tmp_path, capsys):
    killer = Killer("ray::_Worker", tmp_path / "run" / "metrics.jsonl", 1)
    killer.start()
    assert main(["train", *arguments(arithmetic, tmp_path, "run.max_restarts=0", "run.total_steps=50")]) == 3
    assert "trainer rank 0 of 1 died in" in capsys.readouterr().err
