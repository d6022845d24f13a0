"""A real Slurm of two nodes on this machine runs the job script."""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

CONF = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
SlurmctldPort=17000
SlurmctldPidFile={dir}/slurmctld.pid
SlurmctldLogFile={dir}/slurmctld.log
StateSaveLocation={dir}/state
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
ReturnToService=2
MpiDefault=none
SlurmdSpoolDir={dir}/spool-%n
SlurmdPidFile={dir}/slurmd-%n.pid
SlurmdLogFile={dir}/slurmd-%n.log
NodeName=node[1-2] NodeHostname={host} NodeAddr=127.0.0.1 Port=[17001-17002] CPUs=2 RealMemory=8000
PartitionName=cpu Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def install():
    if os.geteuid() != 0:
        pytest.skip("installing Slurm needs root")
    if not shutil.which("slurmctld"):
        steps = (["apt-get", "update"], ["apt-get", "install", "-y", "slurm-wlm", "munge"])
        for step in steps:
            done = subprocess.run(step, capture_output=True, text=True, env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"})
            if done.returncode:
                pytest.skip(f"Slurm cannot be installed: {' '.join(step)}: {done.stderr[-300:]}")


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    """Environment variables under which sbatch and its siblings reach the cluster."""
    install()
    folder = tmp_path_factory.mktemp("slurm")
    for name in ("state", "spool-node1", "spool-node2"):
        (folder / name).mkdir()
    conf = folder / "slurm.conf"
    conf.write_text(CONF.format(host=socket.gethostname(), dir=folder))
    subprocess.run(["service", "munge", "start"], check=True, capture_output=True)
    env = {**os.environ, "SLURM_CONF": str(conf)}
    commands = [["slurmctld", "-D", "-f", conf]] + [["slurmd", "-D", "-f", conf, "-N", f"node{n}"] for n in (1, 2)]
    with open(folder / "daemons.log", "w") as log:
        daemons = [subprocess.Popen(command, env=env, stdout=log, stderr=log) for command in commands]
    deadline = time.monotonic() + 60
    while True:
        states = subprocess.run(["sinfo", "-h", "-o", "%T %D"], env=env, capture_output=True, text=True).stdout
        if states.strip() == "idle 2":
            break
        assert time.monotonic() < deadline, states
        time.sleep(0.5)
    yield env
    for daemon in daemons:
        daemon.terminate()
    for daemon in daemons:
        try:
            daemon.wait(20)
        except subprocess.TimeoutExpired:  # a slurmd with a job that does not end
            daemon.kill()


def submit(env, log, *arguments, **variables):
    command = [
        "sbatch",
        "--wait",
        "--nodes=2",
        "--cpus-per-task=2",
        f"--output={log}",
        "slurm/train.sbatch",
        *map(str, arguments),
    ]
    env = {**env, "GRPO_BIN": str(Path(sys.executable).parent), "GRPO_START_TIMEOUT": "90", **variables}
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    return done.returncode, Path(log).read_text()


def run_arguments(arithmetic, root, *changes):
    return [
        "--config",
        "configs/quickstart.yaml",
        f"run.root={root}",
        "run.total_steps=3",
        f"model.path={arithmetic}/model",
        f"data.train={arithmetic}/data/train.jsonl",
        f"data.eval={arithmetic}/data/eval.jsonl",
        *changes,
    ]


def test_the_quickstart_runs_as_a_job_of_two_nodes(slurm, arithmetic, tmp_path):
    status, log = submit(slurm, tmp_path / "job.out", *run_arguments(arithmetic, tmp_path))
    assert status == 0, log[-3000:]
    assert "Ray at 127.0.0.1:" in log  # what Slurm knows the first node by, NodeAddr
    assert ": 2 nodes" in log
    result = json.loads((tmp_path / "quickstart" / "result.json").read_text())
    assert result["tokens"] > 0
    assert 0 < result["mismatch_max"] <= 1e-4


def test_a_run_that_fails_is_a_job_that_failed(slurm, arithmetic, tmp_path):
    status, log = submit(slurm, tmp_path / "job.out", *run_arguments(arithmetic, tmp_path, "megatron.tensor_parallel=3"))
    assert status == 2, log[-3000:]
    assert "megatron.tensor_parallel=3 does not divide the model's 4 attention heads" in log


STARTER = """#!/usr/bin/env bash
echo "$(basename "$1") ${GLOO_SOCKET_IFNAME:-} ${NCCL_SOCKET_IFNAME:-} $*" >> "$(dirname "$0")/started"
exec "$@"
"""


def test_every_program_is_started_as_told_and_uses_the_interface_that_was_named(slurm, arithmetic, tmp_path):
    addresses = {name: found[0].address for name, found in psutil.net_if_addrs().items() if found[0].family == socket.AF_INET}
    name = next((name for name in addresses if name != "lo"), "lo")
    starter = tmp_path / "start"
    starter.write_text(STARTER)
    starter.chmod(0o755)
    refused = run_arguments(arithmetic, tmp_path, "megatron.tensor_parallel=3")
    status, log = submit(slurm, tmp_path / "job.out", *refused, GRPO_INTERFACE=name, GRPO_RUN=str(starter))
    assert status == 2, log[-3000:]
    assert f"Ray at {addresses[name]}:" in log
    assert ": 2 nodes" in log
    started = [line.split(" ", 3) for line in (tmp_path / "started").read_text().splitlines()]
    rays = [line for line in started if line[0] == "ray"]
    assert [line[1:3] for line in rays] == [[name, name]] * 2  # a head and a worker, whose actors inherit it
    assert "grpo-megatron" in {line[0] for line in started}


def test_an_interface_that_is_not_there_ends_the_job_with_those_that_are(slurm, arithmetic, tmp_path):
    status, log = submit(slurm, tmp_path / "job.out", *run_arguments(arithmetic, tmp_path), GRPO_INTERFACE="ib7")
    assert status == 2, log[-3000:]
    assert "error: network interface ib7 is not there on node" in log
    assert "lo (127.0.0.1)" in log
