"""Processes that die or hang in a live run.

It continues from its newest checkpoint, with the processes that are left.
"""

import contextlib
import itertools
import os
import re
import signal
import threading
import time
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest
import ray

from grpo_megatron.cli import main
from grpo_megatron.cluster.polled_calls import PolledCalls
from grpo_megatron.data import EpochOrder
from grpo_megatron.rollout.evaluation import Evaluation
from grpo_megatron.sglang.pool import EnginePool
from grpo_megatron.trainer.checkpoints import TrainerCheckpoints
from grpo_megatron.trainer.policy import PolicyTrainer
from grpo_megatron.trainer.ranks import RankGroup
from tests.integration.train_runs import arguments, metrics, trained

STEPS = 3
RANK, SCHEDULER, ENGINE = "ray::_Worker", "sglang::scheduler", "ray::SGLangEngine"
WORKER = "ray::WorkerProcess"
# Processes of a loaded machine may stand still for some seconds.
HANG = "cluster.hang_timeout=20"
REPORT = r"Python stacks: (\S+hang-\S+\.txt)"


def find(title: str) -> list[int]:
    """Return the ids of this process's descendants with `title` in the command line."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if title in " ".join(process.cmdline()):
                found.append(process.pid)
    return found


def gone(pid: int) -> bool:
    """Return True if the process ends within a minute, which Ray needs for a stopped process."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.1)
    return False


def fall_asleep(worker) -> None:
    """Let a rank sleep in its next optimizer step, in which the others wait for it in a collective."""
    worker._target.model.optimizer.step = lambda *_: time.sleep(10_000)


class Fault(NamedTuple):
    """A fault of the last process with a title, planted when the driver makes a call for the nth time."""

    owner: type
    """Class of the driver's call."""
    method: str
    """Name of the call."""
    nth: int
    """Which of these calls, counted from 1."""
    title: str
    """Text in the process's command line."""
    what: signal.Signals | None = signal.SIGKILL
    """A signal; None: the process sleeps in its next optimizer step."""
    after: bool = False
    """True for a fault after the call instead of before it."""


@pytest.fixture
def plant(monkeypatch):
    """A function plant(fault) that returns the list of the process ids affected, which will have one
    element.
    """

    def plant(fault: Fault) -> list[int]:
        befallen, calls, original = [], itertools.count(1), getattr(fault.owner, fault.method)

        def strike(caller) -> None:
            if fault.what is None:
                ray.get(caller.ranks.group._workers[-1].__ray_call__.remote(fall_asleep))
                befallen.append(caller.ranks.group.ranks[-1].pid)
            else:
                befallen.append(find(fault.title)[-1])
                os.kill(befallen[0], fault.what)

        def planted(caller, *arguments, **named):
            now = next(calls) == fault.nth
            if now and not fault.after:
                strike(caller)
            result = original(caller, *arguments, **named)
            if now and fault.after:
                strike(caller)
            return result

        monkeypatch.setattr(fault.owner, fault.method, planted)
        return befallen

    return plant


class EnginesSeen(threading.Thread):
    """Records all processes of the engines' actors within the context."""

    def __init__(self):
        super().__init__(daemon=True)
        self.seen: set[int] = set()
        self._ended = threading.Event()

    def run(self) -> None:
        while not self._ended.wait(0.2):
            self.seen |= set(find(ENGINE))

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *_):
        self._ended.set()
        self.join()


def train(arithmetic, tmp_path, capsys, *changes) -> tuple[str, int]:
    """Run to the end. Return the output and the number of engine processes."""
    capsys.readouterr()
    with EnginesSeen() as engines:
        status = main(
            [
                "train",
                *arguments(arithmetic, tmp_path, f"run.total_steps={STEPS}", "checkpoint.every=1", *changes),
            ]
        )
    captured = capsys.readouterr()
    assert status == 0, captured.err
    assert [row["step"] for row in metrics(tmp_path, "run") if "time/step" in row] == list(
        range(1, STEPS + 1)
    )
    # No prompt was skipped, none trained twice.
    prompts = len((arithmetic / "data" / "train.jsonl").read_text().splitlines())
    assert trained(tmp_path, "run") == EpochOrder(prompts, 1234, True).take(6 * STEPS)
    return captured.out, len(engines.seen)


TWO_RANKS = "megatron.tensor_parallel=2"


@pytest.mark.slow
def test_a_run_outlives_a_dead_rank_and_one_that_sleeps_in_a_collective(
    ray_here, arithmetic, tmp_path, capsys, plant
):
    """The engine is kept both times."""
    dead = plant(Fault(PolicyTrainer, "train_mini_batch", 3, RANK))
    asleep = plant(Fault(PolicyTrainer, "train_mini_batch", 6, RANK, what=None))
    said, engines = train(arithmetic, tmp_path, capsys, HANG, TWO_RANKS)
    assert re.search(
        r"trainer rank \d of 2 died in `mini_batches.train_step`.*restart 1 of at most 3, from ",
        said,
        re.DOTALL,
    ), said
    asleep_for = (
        r"rank 1 \(tp1 pp0 cp0 dp0 ep0\) in `optimizer` for \d+ s, at \S+test_recovery.py:\d+ <lambda>"
    )
    assert re.search(asleep_for, said), said
    assert re.search(r"other processes: 1 in `optimizer`, at \S+distributed_c10d.py:\d+ all_reduce", said), (
        said
    )
    assert "time.sleep(10_000)" in Path(re.search(REPORT, said).group(1)).read_text()
    assert "restart 2 of at most 3, from " in said
    assert gone(dead[0])
    assert gone(asleep[0])
    assert engines == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "engines"),
    [
        (Fault(PolledCalls, "_send", 2, SCHEDULER, after=True), 2),
        (Fault(PolledCalls, "_send", 2, ENGINE, after=True), 2),
        (Fault(PolledCalls, "_send", 2, WORKER, after=True), 1),
        (Fault(TrainerCheckpoints, "begin_checkpoint", 2, RANK, after=True), 1),
        (Fault(PolicyTrainer, "measure", 1, RANK), 1),
    ],
    ids=[
        "scheduler in generation",
        "engine in generation",
        "rollout worker in generation",
        "rank while saving",
        "rank before the first checkpoint",
    ],
)
def test_a_run_outlives_the_death_of_a_process(ray_here, arithmetic, tmp_path, capsys, plant, fault, engines):
    """engines: number of engine processes, one after the other. A dead rank leaves the engine as it is.

    Ranks wait for a dead engine to come back.
    """
    befallen = plant(fault)
    said, seen = train(arithmetic, tmp_path, capsys, TWO_RANKS)
    assert len(befallen) == 1
    died = {RANK: "trainer rank", WORKER: "rollout worker 0 died in `sample`"}
    assert died.get(fault.title, "engine 0 died in `generate`") in said
    assert said.count("restart 1 of at most 3, from ") == (engines == 1)
    assert said.count("no engine serves meanwhile") == (engines == 2)
    assert "restart 2" not in said
    assert ("from the beginning" in said) == (fault.method == "measure")
    assert seen == engines


@pytest.mark.slow
@pytest.mark.parametrize("title", [RANK, SCHEDULER])
@pytest.mark.parametrize("transport", ["shared_memory", "groups", "disk"])
def test_a_death_in_a_weight_sync_names_who_died(
    ray_here, arithmetic, tmp_path, capsys, plant, transport, title
):
    """The message names the dead process, whatever errors the survivors raise."""
    befallen = plant(Fault(EnginePool, "receive_weights", 3, title))
    changes = [f"weight_sync.transport={transport}", "weight_sync.bucket_bytes=20000", TWO_RANKS]
    changes += [f"weight_sync.folder={tmp_path}/weights"] if transport == "disk" else []
    said, _ = train(arithmetic, tmp_path, capsys, *changes)
    assert befallen
    assert re.search(rf"{'trainer rank . of 2' if title == RANK else 'engine 0'} died in `.*`", said), said
    # Processes in collective calls cannot be told that the sync has ended.
    restarts = title == RANK or transport == "groups"
    assert ("restart 1 of at most 3, from " in said, "no engine serves" in said) == (restarts, not restarts)
    assert "restart 2" not in said


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["groups", "disk"])
def test_an_engine_that_stays_takes_the_weights_of_new_ranks(
    ray_here, arithmetic, tmp_path, capsys, plant, transport
):
    """The connections are new, because the partner of the old ones died."""
    plant(Fault(PolicyTrainer, "train_mini_batch", 4, RANK))
    changes = [f"weight_sync.transport={transport}", "weight_sync.probe_every=1", TWO_RANKS]
    changes += [f"weight_sync.folder={tmp_path}/weights"] if transport == "disk" else []
    said, seen = train(arithmetic, tmp_path, capsys, *changes)
    assert "restart 1 of at most 3, from " in said
    assert seen == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault",
    [
        Fault(EnginePool, "resume_weights", 2, SCHEDULER),
        Fault(RankGroup, "wake", 3, RANK),
        Fault(PolledCalls, "_send", 2, SCHEDULER, after=True),
    ],
    ids=["engine takes back its weights", "rank wakes", "engine in generation"],
)
def test_colocated_processes_are_replaced_together(ray_here, arithmetic, tmp_path, capsys, plant, fault):
    befallen = plant(fault)
    changes = ["cluster.placement=colocated", "megatron.sleep=true", TWO_RANKS]
    said, seen = train(arithmetic, tmp_path, capsys, *changes)
    assert befallen
    assert "restart 1 of at most 3, from " in said
    assert "restart 2" not in said
    assert seen == 2


@pytest.mark.slow
def test_a_death_in_an_evaluation_and_one_in_the_restart(ray_here, arithmetic, tmp_path, capsys, plant):
    first, second = (
        plant(Fault(Evaluation, "run", 3, SCHEDULER)),
        plant(Fault(TrainerCheckpoints, "load_checkpoint", 1, RANK)),
    )
    changes = [f"data.eval={arithmetic}/data/eval.jsonl", "eval.every=1", "eval.n=1", TWO_RANKS]
    said, _ = train(arithmetic, tmp_path, capsys, *changes)
    assert len(first) == len(second) == 1
    assert "restart 2 of at most 3, from " in said
    assert "restart 3" not in said


@pytest.mark.slow
def test_without_restarts_the_run_ends(ray_here, arithmetic, tmp_path, capsys, plant):
    plant(Fault(PolicyTrainer, "train_mini_batch", 2, RANK))
    assert main(["train", *arguments(arithmetic, tmp_path, "run.max_restarts=0", "run.total_steps=50")]) == 3
    assert "trainer rank 0 of 1 died in" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "line"),
    [
        (
            Fault(PolicyTrainer, "train_mini_batch", 3, RANK, signal.SIGSTOP),
            r"rank \d \(tp\d pp0 cp0 dp0 ep0\) has sent no heartbeat for \d+ s",
        ),
        (
            Fault(PolledCalls, "_send", 2, SCHEDULER, signal.SIGSTOP),
            r"engine 0 in `generate` for \d+ s, at sglang::scheduler \(pid \d+\) stopped",
        ),
        (
            Fault(PolledCalls, "_send", 2, ENGINE, signal.SIGSTOP),
            r"engine 0 has sent no heartbeat for \d+ s",
        ),
        (
            Fault(EnginePool, "receive_weights", 3, SCHEDULER, signal.SIGSTOP),
            r"engine 0 in `receive_weights` for \d+ s, at sglang::scheduler \(pid \d+\) stopped",
        ),
    ],
    ids=["rank stopped", "scheduler stopped", "engine stopped", "scheduler stopped in a sync"],
)
def test_a_run_outlives_a_hang(ray_here, arithmetic, tmp_path, capsys, plant, fault, line):
    befallen = plant(fault)
    said, _ = train(arithmetic, tmp_path, capsys, HANG, TWO_RANKS)
    assert re.search(line, said), said
    assert re.search(REPORT, said), said
    # Ranks wait for an engine.
    assert ("restart 1 of at most 3, from " in said) == (fault.title == RANK)
    assert gone(befallen[0])


@pytest.mark.slow
@pytest.mark.parametrize("two_nodes", [(1, 0)], indirect=True)
def test_a_node_that_leaves_ends_the_run(two_nodes, arithmetic, tmp_path, capsys, plant):
    """Must be the last test here, because its cluster stays until the end of the module."""
    plant(Fault(PolicyTrainer, "train_mini_batch", 2, "/raylet/raylet "))
    # With few steps it could be done before the death of the node is noticed.
    assert (
        main(["train", *arguments(arithmetic, tmp_path, "run.total_steps=1000", "checkpoint.every=1")]) == 3
    )
    assert (
        "the Ray cluster has lost 1 of the 2 nodes of this run; start the run again on working nodes"
        in capsys.readouterr().err
    )
