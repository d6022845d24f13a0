"""A real Slurm of two nodes on this machine runs jobs: slurm/submit.py, and slurm/train.sbatch by hand."""

import json
import os
import shlex
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from tests.integration import local_slurm
from tests.integration.local_slurm import asked, ended, facts, wait_in

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    """Environment variables with which sbatch and its siblings reach the cluster."""
    local_slurm.install()
    with local_slurm.started(tmp_path_factory.mktemp("slurm")) as env:
        yield env


def run_arguments(arithmetic, root, *changes):
    return [
        f"run.root={root}",
        "run.total_steps=3",
        f"model.path={arithmetic}/model",
        f"data.train={arithmetic}/data/train.jsonl",
        f"data.eval={arithmetic}/data/eval.jsonl",
        *changes,
    ]


def submit(env, folder, *arguments, status=0):
    """Return the numbers of the jobs that slurm/submit.py has queued, or its message."""
    done = submit_py(env, folder, *arguments, status=status)
    return done.stderr if status else done.stdout.removeprefix("queued as ").split(";")[0].split(", ")


def submit_py(env, folder, *arguments, status=0):
    """Run slurm/submit.py from another folder than the project's."""
    config = ["--config", str(ROOT / "configs/quickstart.yaml")]
    command = [
        sys.executable,
        str(ROOT / "slurm/submit.py"),
        *config,
        "--start-timeout",
        "300",
        *map(str, arguments),
    ]
    # The tests may be those of another copy of the project than the installed one.
    env = env | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=env, cwd=folder, capture_output=True, text=True)
    assert done.returncode == status, done.stdout + done.stderr
    return done


class Watch(threading.Thread):
    """Observer of a job's processes: where ranks and engines run, and every argument of every program."""

    def __init__(self, job: str):
        super().__init__(daemon=True)
        self.places: dict[str, str] = {}  # node, by the name of the log that a process writes
        self.arguments: set[str] = set()
        self.token = ""
        self._job, self._over = job, threading.Event()

    def run(self):
        while not self._over.wait(0.5):
            for process in psutil.process_iter():
                try:
                    env = process.environ()
                    if env.get("SLURM_JOB_ID") != self._job:
                        continue
                    self.token = env.get("RAY_AUTH_TOKEN", self.token)
                    self.arguments.update(process.cmdline())
                    log = Path(os.readlink(f"/proc/{process.pid}/fd/1"))
                    if log.parent.name == "logs":
                        self.places[log.stem] = env["SLURMD_NODENAME"]
                except (psutil.Error, OSError):
                    continue

    def close(self):
        self._over.set()
        self.join()


def test_one_command_trains_on_two_nodes(slurm, arithmetic, tmp_path, record_property):
    """Ray's token must not be in any argument, log or record of Slurm's."""
    sizes = ("megatron.data_parallel=2", "rollout.engine.num_engines=2")
    queued = time.time()
    (job,) = submit(slurm, tmp_path, "--nodes", 2, *run_arguments(arithmetic, tmp_path, *sizes))
    watch = Watch(job)
    watch.start()
    run = tmp_path / "quickstart"
    # Evaluations are rows too; a step has a loss.
    wait_in(slurm, job, lambda: "throughput/" in _text(run / "metrics.jsonl"))
    seconds = time.time() - queued
    shown = facts(slurm, job)
    found = ended(slurm, job)
    watch.close()
    logs = {path.name: path.read_text() for path in (run / "slurm").iterdir()}
    assert (found["JobState"], found["ExitCode"]) == ("COMPLETED", "0:0"), logs[f"{job}.log"][-3000:]
    assert set(logs) == {f"{job}.log", f"{job}-node1.log", f"{job}-node2.log"}
    assert all("Ray runtime started" in logs[f"{job}-node{number}.log"] for number in (1, 2))
    result = json.loads((run / "result.json").read_text())
    assert result["tokens"] > 0
    assert 0 < result["mismatch_max"] <= 1e-4
    # As the network has the nodes, where node2 comes first.
    assert {name: watch.places[name] for name in ("rank0", "rank1", "rank2", "rank3")} == {
        "rank0": "node2",
        "rank1": "node2",
        "rank2": "node1",
        "rank3": "node1",
    }
    assert {watch.places["engine0"], watch.places["engine1"]} == {"node1", "node2"}
    assert len(watch.token) == 64
    for text in (*watch.arguments, *logs.values(), *shown.values()):
        assert watch.token not in text
    record_property("seconds_to_first_step", seconds)
    (ray_up,) = [line for line in logs[f"{job}.log"].splitlines() if "Ray is up on" in line]
    print(f"{seconds:.0f} s from sbatch to the first optimizer step; {ray_up}")


def _text(path):
    return path.read_text() if path.exists() else ""


def test_what_cannot_run_is_refused_before_it_is_queued(slurm, arithmetic, tmp_path):
    before = asked(slurm, "scontrol", "show", "jobs", "-o").count("JobId=")
    wrong = run_arguments(arithmetic, tmp_path, "megatron.tensor_parallel=3")
    says = submit(slurm, tmp_path, "--nodes", 2, *wrong, status=2)
    assert (
        "megatron.tensor_parallel must divide the model's attention heads (megatron.tensor_parallel=3" in says
    )
    # What the shell says of a partition is not what is asked for.
    env = slurm | {"SBATCH_PARTITION": "cpu"}
    says = submit(
        env, tmp_path, "--nodes", 2, "--partition", "gold", *run_arguments(arithmetic, tmp_path), status=2
    )
    assert "error: Slurm rejected the job: " in says
    assert "invalid partition" in says
    assert asked(slurm, "scontrol", "show", "jobs", "-o").count("JobId=") == before


# In the place of grpo-megatron: leaves what it was given, and stops on request as a run does.
STAND_IN = """#!{python}
import json, os, signal, sys, time
settings = dict(argument.split("=", 1) for argument in sys.argv[1:] if "=" in argument)
run = os.path.join(settings["run.root"], settings["run.name"])
os.makedirs(run, exist_ok=True)
signal.signal(signal.SIGUSR1, lambda *_: sys.exit(75))
restarts = os.environ.get("SLURM_RESTART_COUNT", "0")
given = {{"arguments": sys.argv[1:], "hostile": os.environ.get("HOSTILE"), "folder": os.getcwd(), \
"started": time.time()}}
with open(os.path.join(run, "given" + restarts), "w") as file:
    json.dump(given, file)
{then}
given["ended"] = time.time()
with open(os.path.join(run, "result.json"), "w") as file:
    json.dump(given, file)
"""


def programs(folder, then):
    """Make a folder for --bin with the environment's python and a stand-in for the driver.

    The job is tested.
    """
    folder.mkdir()
    (folder / "python").write_text(f'#!/bin/sh\nexec {shlex.quote(str(BIN / "python"))} "$@"\n')
    (folder / "grpo-megatron").write_text(STAND_IN.format(python=sys.executable, then=then))
    for path in folder.iterdir():
        path.chmod(0o755)
    return folder


def test_a_run_that_was_stopped_is_queued_again_and_the_rest_of_its_chain_asks_the_program(
    slurm, arithmetic, tmp_path
):
    finished = "os.path.exists(os.path.join(run, 'result.json'))"
    bin = programs(tmp_path / "bin", f'if restarts == "0" and not {finished}:\n    time.sleep(600)')
    changes = ("run.name=chained", "run.resume=auto")
    # With options of srun every program is a step, including the driver, as in Pyxis containers. The signal
    # goes through srun.
    as_steps = ("--env", "GRPO_SRUN=--kill-on-bad-exit=1")
    options = ("--nodes", 2, "--bin", bin, "--requeue", "--dependency-chain", 2, *as_steps)
    first, second = submit(slurm, tmp_path, *options, *run_arguments(arithmetic, tmp_path, *changes))
    run = tmp_path / "chained"
    wait_in(slurm, first, (run / "given0").exists)
    # As Slurm does some time before the limit.
    asked(slurm, "scancel", "--batch", "--signal=USR1", first)
    found = ended(slurm, first)
    log = (run / "slurm" / f"{first}.log").read_text()
    assert (found["JobState"], found["ExitCode"], found["Restarts"]) == ("COMPLETED", "0:0", "1"), log
    assert f"job {first} stopped on request and is queued again (restart 1)" in log
    assert (run / "result.json").exists()
    found = ended(slurm, second)
    assert (found["JobState"], found["ExitCode"]) == ("COMPLETED", "0:0")
    # It is for the program to find that the run is finished.
    assert f"job {second}: Ray is up on " in (run / "slurm" / f"{second}.log").read_text()
    assert not [
        process
        for process in psutil.process_iter(["environ"])
        if (process.info["environ"] or {}).get("SLURM_JOB_ID") == first
    ]


def test_a_script_of_a_dry_run_is_queued_by_hand_and_cancelled(slurm, arithmetic, tmp_path):
    """A plain scancel does not queue the job again."""
    options = ("--nodes", 2, "--bin", programs(tmp_path / "bin", "time.sleep(600)"), "--requeue", "--dry-run")
    script = submit_py(
        slurm, tmp_path, *options, *run_arguments(arithmetic, tmp_path, "run.name=by_hand")
    ).stdout
    run = tmp_path / "by_hand"
    assert not run.exists()
    (tmp_path / "job.sbatch").write_text(script)
    (run / "slurm").mkdir(parents=True)
    queued = subprocess.run(
        ["sbatch", "job.sbatch"], env=slurm, cwd=tmp_path, capture_output=True, text=True, check=True
    )
    job = queued.stdout.split()[-1]
    wait_in(slurm, job, (run / "given0").exists)
    assert asked(slurm, "scontrol", "write", "batch_script", job, "-") == script.strip()
    asked(slurm, "scancel", job)
    found = ended(slurm, job)
    assert (found["JobState"], found["Restarts"]) == ("CANCELLED", "0")


def test_runs_of_an_array_share_nodes_and_get_every_value_as_it_is(slurm, arithmetic, tmp_path):
    hostile = """it's "$HOME" \\ `id` #1 * ; %j $(false)"""
    root = tmp_path / """it's "$HOME" 'for'#1 %j & more"""
    bin = programs(tmp_path / "bin of mine", "time.sleep(25)")
    options = ("--nodes", 2, "--cpus-per-node", 2, "--array", "3,5", "--bin", bin)
    texts = ("--env", f"HOSTILE={hostile}", "--sbatch-arg", f"--comment={hostile}")
    changes = ("run.seed={task}", f"reward.extract={hostile}{{task}}")
    (job,) = submit(slurm, tmp_path, *options, *texts, *run_arguments(arithmetic, root, *changes))
    assert asked(slurm, "squeue", "-h", "-t", "all", "-j", job, "-o", "%k").splitlines()[0] == hostile
    found = {}
    for task in (3, 5):
        run = root / f"quickstart_{task}"
        assert ended(slurm, f"{job}_{task}")["ExitCode"] == "0:0", "".join(
            map(_text, (run / "slurm").iterdir())
        )
        found[task] = json.loads((run / "result.json").read_text())
        assert found[task]["hostile"] == hostile
        assert {f"run.root={root}", f"run.seed={task}", f"reward.extract={hostile}{task}"} <= set(
            found[task]["arguments"]
        )
        assert found[task]["folder"] == str(tmp_path)
        assert "Ray is up on node2 node1" in (run / "slurm" / f"{job}_{task}.log").read_text()
        assert len(list((run / "slurm").glob("*-node[12].log"))) == 2
    # Both had the same nodes at a time, each with a Ray of its own.
    assert max(one["started"] for one in found.values()) < min(one["ended"] for one in found.values())


def test_a_run_that_slurm_stops_goes_on_after_its_restart(slurm, arithmetic, tmp_path):
    changes = ("run.name=stopped", "run.total_steps=12")
    (job,) = submit(
        slurm, tmp_path, "--nodes", 2, "--requeue", *run_arguments(arithmetic, tmp_path, *changes)
    )
    run = tmp_path / "stopped"
    wait_in(slurm, job, lambda: _text(run / "metrics.jsonl").count("throughput/") >= 3)
    asked(slurm, "scancel", "--batch", "--signal=USR1", job)
    found = ended(slurm, job)
    log = (run / "slurm" / f"{job}.log").read_text()
    assert (found["JobState"], found["ExitCode"], found["Restarts"]) == ("COMPLETED", "0:0", "1"), log[-3000:]
    rows = [json.loads(row) for row in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "throughput/tokens_per_second" in row] == list(range(1, 13))


def test_a_second_job_brings_an_engine(slurm, arithmetic, tmp_path):
    """It ends with the first job."""
    changes = ("run.name=grows", "rollout.engine.max_engines=2", "cluster.placement=separate")
    endless = ("run.total_steps=10000", "data.eval=null")
    (job,) = submit(slurm, tmp_path, "--nodes", 1, *run_arguments(arithmetic, tmp_path, *changes, *endless))
    run = tmp_path / "grows"

    def engines():
        rows = map(json.loads, _text(run / "metrics.jsonl").splitlines()[:-1])
        return {row.get("rollout/engines") for row in rows}

    wait_in(slurm, job, lambda: engines() == {1})
    join = run / "slurm" / "join"
    assert join.stat().st_mode & 0o777 == 0o600
    variables = f"--export=ALL,GRPO_JOINS={join},GRPO_BIN={BIN}"
    queued = subprocess.run(
        ["sbatch", "--parsable", "--nodes=1", "--cpus-per-task=1", variables, ROOT / "slurm/train.sbatch"],
        env=slurm,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    wait_in(slurm, job, lambda: engines() == {1, 2})
    asked(slurm, "scancel", "--batch", "--signal=USR1", job)
    assert ended(slurm, job)["ExitCode"] == "75:0"
    second = ended(slurm, queued.stdout.strip())
    assert second["JobState"] == "COMPLETED", Path(second["StdOut"]).read_text()
    assert not join.exists()


def sbatch(env, log, *arguments, **variables):
    """Submit slurm/train.sbatch by hand and return (exit status, output)."""
    command = [
        "sbatch",
        "--wait",
        "--nodes=2",
        "--cpus-per-task=2",
        f"--output={log}",
        "slurm/train.sbatch",
        *("--config", "configs/quickstart.yaml"),
        *map(str, arguments),
    ]
    env = {**env, "GRPO_BIN": str(BIN), "GRPO_START_TIMEOUT": "240", **variables}
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True)
    return done.returncode, Path(log).read_text()


def test_a_run_that_fails_is_a_job_that_failed(slurm, arithmetic, tmp_path):
    status, log = sbatch(
        slurm,
        tmp_path / "job.out",
        *run_arguments(arithmetic, tmp_path, "megatron.tensor_parallel=3"),
    )
    assert status == 2, log[-3000:]
    assert (
        "megatron.tensor_parallel must divide the model's attention heads (megatron.tensor_parallel=3" in log
    )


STARTER = """#!/usr/bin/env bash
echo "$(basename "$1") ${GLOO_SOCKET_IFNAME:-} ${NCCL_SOCKET_IFNAME:-} $*" >> "$(dirname "$0")/started"
exec "$@"
"""


def test_every_program_is_started_as_told_and_uses_the_interface_that_was_named(slurm, arithmetic, tmp_path):
    addresses = {
        name: found[0].address
        for name, found in psutil.net_if_addrs().items()
        if found[0].family == socket.AF_INET
    }
    name = next((name for name in addresses if name != "lo"), "lo")
    starter = tmp_path / "start"
    starter.write_text(STARTER)
    starter.chmod(0o755)
    refused = run_arguments(arithmetic, tmp_path, "megatron.tensor_parallel=3")
    status, log = sbatch(slurm, tmp_path / "job.out", *refused, GRPO_INTERFACE=name, GRPO_RUN=str(starter))
    assert status == 2, log[-3000:]
    assert f"Ray at {addresses[name]}:" in log
    assert ": 2 nodes" in log
    started = [line.split(" ", 3) for line in (tmp_path / "started").read_text().splitlines()]
    rays = [line for line in started if "grpo_megatron.cluster.ray_command start" in line[3]]
    assert [line[1:3] for line in rays] == [[name, name]] * 2  # a head and a worker, whose actors inherit it
    assert "grpo-megatron" in {line[0] for line in started}


def test_an_interface_that_is_not_there_ends_the_job_with_those_that_are(slurm, arithmetic, tmp_path):
    status, log = sbatch(
        slurm,
        tmp_path / "job.out",
        *run_arguments(arithmetic, tmp_path),
        GRPO_INTERFACE="ib7",
    )
    assert status == 2, log[-3000:]
    assert "error: network interface ib7 does not exist on node" in log
    assert "lo (127.0.0.1)" in log
