"""Runs whose driver or rank is killed again and again at random moments. They must end as if undisturbed."""

import contextlib
import json
import os
import random
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
import pytest

from grpo_megatron.batch.prompt import Prompt
from grpo_megatron.batch.sample import Group, Sample
from grpo_megatron.data import EpochOrder
from tests.integration.train_runs import arguments, trained
from tests.ledgers import used_prompts
from tests.parallel.checkpoints import global_tensors
from tests.rollouts import recorder_of

STEPS = 60
GROUPS, N, LONGEST = 4, 3, 12
SECONDS = 600  # that any part of a run may take on a busy machine


@pytest.fixture(scope="module")
def recording(tmp_path_factory):
    """Samples of random tokens."""
    path = str(tmp_path_factory.mktemp("recording") / "rollouts")
    draw, recorder = np.random.default_rng(7), recorder_of(path)
    for step in range(1, STEPS + 1):
        groups = []
        for group in range(GROUPS):
            ids = draw.integers(3, 15, 6).astype(np.int32)
            responses = [
                draw.integers(3, 15, draw.integers(3, LONGEST + 1)).astype(np.int32) for _ in range(N)
            ]
            samples = [
                Sample.of(
                    group_id=group,
                    trajectory_id=N * group + number,
                    prompt_ids=ids,
                    response_ids=response,
                    loss_mask=np.ones(len(response), bool),
                    rollout_logprobs=-3.4 + draw.normal(0, 0.3, len(response)).astype(np.float32),
                    finish_reason="stop",
                    reward=float(draw.integers(0, 2)),
                )
                for number, response in enumerate(responses)
            ]
            groups.append(Group(group, Prompt(GROUPS * step + group, ids, "", ""), tuple(samples)))
        recorder.write(step, groups)
    return path


def train_arguments(arithmetic, recording, root) -> list[str]:
    """Return arguments of a run whose checkpoint must also have a reference that is reset, a KL
    coefficient, an entropy.
    """
    return [
        "train",
        f"run.root={root}",
        f"model.path={arithmetic}/model",
        f"rollout.replay={recording}",
        f"rollout.max_response_length={LONGEST}",
        f"rollout.n={N}",
        f"data.train_batch_size={GROUPS}",
        "train.ppo_mini_batch_size=2",
        "data.max_prompt_length=16",
        "algorithm.preset=reinforce_pp",
        "algorithm.use_kl_loss=true",
        "algorithm.kl_ctrl.type=adaptive",
        "algorithm.kl_ctrl.horizon=100",
        "algorithm.entropy_coeff=0.5",
        "algorithm.entropy_floor=3.3",
        "ref.reset_every=3",
        "mismatch.action=off",
    ]


def sft_arguments(arithmetic, recording, root) -> list[str]:
    """Return arguments of a run with epochs of few steps."""
    lines = (arithmetic / "data" / "sft.jsonl").read_text().splitlines(keepends=True)[:50]
    data = Path(root, "sft.jsonl")
    data.write_text("".join(lines))
    return [
        "sft",
        f"run.root={root}",
        f"model.path={arithmetic}/model",
        f"data.train={data}",
        "data.train_batch_size=8",
        "data.max_prompt_length=16",
        "rollout.max_response_length=32",
    ]


COMMON = [
    f"run.total_steps={STEPS}",
    "run.max_restarts=20",
    "megatron.precision=fp32",
    "megatron.data_parallel=2",
    "megatron.distributed_optimizer=true",
    "optimizer.lr=0.003",
    "checkpoint.every=2",
    "checkpoint.export_hf=false",
]


@dataclass
class Started:
    """A run by the command line, in a session of its own.

    folder: the run's folder.
    """

    command: list[str]
    folder: Path
    log: Path

    def __post_init__(self):
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "grpo_megatron.cli", *self.command],
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def wait_for(self, happened) -> bool:
        """Wait for the condition. Return False if the run ended before."""
        deadline = time.monotonic() + SECONDS
        while not happened():
            if self.process.poll() is not None:
                return False
            assert time.monotonic() < deadline, self.said()
            time.sleep(0.002)
        return True

    def wait_for_step(self, step: int) -> bool:
        return self.wait_for(lambda: self.last_step() >= step)

    def last_step(self) -> int:
        path = self.folder / "metrics.jsonl"
        rows = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
        return json.loads(rows[-1])["step"] if rows else 0

    def children(self, title: str) -> list[psutil.Process]:
        found = []
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in psutil.Process(self.process.pid).children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    found += [child] if title in " ".join(child.cmdline()) else []
        return found

    def end(self) -> None:
        """End all processes of the run. Leftovers of a killed driver are not tested here."""
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
                if os.getsid(process.pid) == self.process.pid:
                    process.kill()
        self.process.wait()

    def said(self) -> str:
        return self.log.read_text(errors="replace")[-4000:]


def finish(run: Started) -> None:
    assert run.process.wait(SECONDS) == 0, run.said()
    run.end()


# (process that is killed, moment): in a step, while a checkpoint is saved, or while the run is starting.
MOMENTS = {
    "train": [
        *[("driver", "step"), ("rank", "step"), ("driver", "saving"), ("rank", "saving")] * 2,
        ("driver", "starting"),
    ],
    "sft": [("driver", "step"), ("rank", "step"), ("driver", "saving")],
}


def strike(run: Started, who: str, when: str, draw: random.Random) -> bool:
    """Kill the process at that moment. Return False if the run ended before."""
    begun = run.last_step()
    if when == "starting":
        reached = run.wait_for(lambda: bool(run.children("ray::_Worker")))
    else:
        # Without a checkpoint, which there is after a few steps, the same command would begin a new run.
        reached = run.wait_for_step(max(5, begun + draw.randrange(1, 4)))
    if when == "saving":
        reached = reached and run.wait_for(lambda: any(run.folder.glob("checkpoints/*.partial")))
    if not reached:
        return False
    time.sleep(draw.uniform(0, 0.02 if when == "saving" else 0.3))
    if who == "driver":
        run.process.kill()
        run.end()
        return True
    ranks = run.children("ray::_Worker")
    if ranks:
        with contextlib.suppress(psutil.NoSuchProcess):
            draw.choice(ranks).kill()
    return bool(ranks)


def result_of(folder: Path) -> tuple[dict, dict]:
    """Return (all tensors, the driver's state) of the last checkpoint, without values that depend on a clock
    or on when the run was killed.
    """
    checkpoint = folder / "checkpoints" / f"step_{STEPS:08d}"
    state = json.loads((checkpoint / "state.json").read_text())
    del state["config"]
    state.get("totals", {}).pop("seconds", None)
    if "ledger" in state:  # which also has what the attempts before the last one did
        state["ledger"] = {name: state["ledger"][name] for name in ("step", "tokens", "prompts")}
    return global_tensors(str(checkpoint / "actor")), state


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("command", MOMENTS)
def test_a_run_that_is_killed_ends_as_if_undisturbed(arithmetic, recording, tmp_path, command):
    """Parameters, masters, moments and the reference agree bit for bit.

    Every step is logged and noted once.
    """
    make = {"train": train_arguments, "sft": sft_arguments}[command]
    runs = {}
    for name in ("undisturbed", "killed"):
        given = [*make(arithmetic, recording, tmp_path), *COMMON, f"run.name={name}"]
        runs[name] = lambda given=given, name=name: Started(given, tmp_path / name, tmp_path / f"{name}.log")
    finish(runs["undisturbed"]())
    draw, struck = random.Random(11), 0
    run = runs["killed"]()
    for who, when in MOMENTS[command]:
        struck += strike(run, who, when, draw)
        if run.process.poll() is not None:
            run.end()
            run = runs["killed"]()
    finish(run)
    assert struck >= len(MOMENTS[command]) - 1, run.said()
    tensors, state = result_of(tmp_path / "undisturbed")
    found, found_state = result_of(tmp_path / "killed")
    assert found_state == state
    assert found.keys() == tensors.keys()
    assert [name for name in tensors if not found[name].equal(tensors[name])] == []
    lines = [(tmp_path / run / "metrics.jsonl").read_text().splitlines() for run in runs]
    rows = [[json.loads(row) for row in own] for own in lines]
    assert [row["step"] for row in rows[1]] == list(range(1, STEPS + 1))
    assert [row.get("actor/loss") for row in rows[1]] == [row.get("actor/loss") for row in rows[0]]
    if command == "train":
        # The recording has other prompts in each step. `trained` also checks that the books balance.
        prompts = trained(tmp_path, "killed")
        assert prompts == trained(tmp_path, "undisturbed") == list(range(GROUPS, GROUPS * (STEPS + 1)))
        assert list(used_prompts(tmp_path / "killed")) == list(range(1, STEPS + 1))
    assert not list(tmp_path.glob("killed.*[0-9]"))  # nothing was moved aside


# How often the driver is killed beside training. A larger number, such as 20, takes a minute for each.
KILLS = int(os.environ.get("DRIVER_KILLS", "3"))
BESIDE_TRAINING = (
    "rollout.staleness=2",
    "rollout.order=window",
    "rollout.on_update=continue",
    "train.old_logprobs=rollout",
    "cluster.placement=separate",
)


@pytest.mark.slow
@pytest.mark.timeout(1800 + 120 * KILLS)
@pytest.mark.parametrize(
    ("beside", "drivers"), [((), 2), (BESIDE_TRAINING, KILLS)], ids=["in turn", "beside training"]
)
def test_no_prompt_is_skipped_or_trained_twice(arithmetic, tmp_path, beside, drivers):
    """Rank, engine and rollout worker are killed, twice each, while the run generates and trains.

    The driver is killed, too, and the same command continues the run. `trained` also checks that the books
    balance. Rules R3 to R5: another stack skipped prompts after a restart, or trained some twice.
    """
    data = tmp_path / "train.jsonl"
    data.write_text("".join((arithmetic / "data" / "train.jsonl").read_text().splitlines(keepends=True)[:20]))
    steps = 24 + 4 * drivers
    changes = [
        "run.resume=auto",
        "run.max_restarts=20",
        f"run.total_steps={steps}",
        "checkpoint.every=2",
        f"data.train={data}",
        *beside,
    ]
    command = ["train", *arguments(arithmetic, tmp_path, *changes)]
    folder = tmp_path / "run"
    run, draw = Started(command, folder, tmp_path / "log"), random.Random(3)
    titles = [*[""] * drivers, *["ray::_Worker", "sglang::scheduler", "ray::WorkerProcess"] * 2]
    for title in draw.sample(titles, len(titles)):
        assert run.wait_for_step(max(5, run.last_step() + 2)), run.said()
        time.sleep(draw.uniform(0, 0.2))
        if title:
            run.children(title)[0].kill()
        else:
            run.process.kill()
            run.end()
            run = Started(command, folder, tmp_path / "log")
    finish(run)
    found, expected = trained(tmp_path, "run"), EpochOrder(20, 1234, True).take(6 * steps)
    # With a window, a prompt may be trained later than others that were drawn after it.
    assert (sorted(found), found == expected or bool(beside)) == (sorted(expected), True)
    assert run.log.read_text(errors="replace").count("\nrestart ") >= 3
    assert not list(tmp_path.glob("run.*"))  # nothing began anew
