"""A real Slurm cluster of two nodes on this machine."""

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from grpo_megatron.cluster.ports import free_ports

# cred_expire: how long a job that is queued again waits before it may start, two minutes by default.
CONF = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=cred_expire=10
SlurmctldPort={port}
SlurmctldPidFile={dir}/slurmctld.pid
SlurmctldLogFile={dir}/slurmctld.log
StateSaveLocation={dir}/state
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
TopologyPlugin=topology/tree
SlurmdParameters=config_overrides
ReturnToService=2
MpiDefault=none
TaskProlog={dir}/prolog
SlurmdSpoolDir={dir}/spool-%n
SlurmdPidFile={dir}/slurmd-%n.pid
SlurmdLogFile={dir}/slurmd-%n.log
NodeName=node[1-2] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{first}-{last}] CPUs=4 RealMemory=8000
PartitionName=cpu Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
# The switches are named so that node2 comes first.
TOPOLOGY = """
SwitchName=leaf1 Nodes=node2
SwitchName=leaf2 Nodes=node1
SwitchName=top Switches=leaf[1-2]
"""

# What each job's script and each task of srun prints first, as sites have it.
WELCOME = "welcome to this node"

ENDS = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")


def install() -> None:
    """Install Slurm, or skip the test if that is not possible."""
    if os.geteuid() != 0:
        pytest.skip("installing and starting Slurm needs root")
    if not shutil.which("slurmctld"):
        steps = (["apt-get", "update"], ["apt-get", "install", "-y", "slurm-wlm", "munge"])
        for step in steps:
            done = subprocess.run(
                step, capture_output=True, text=True, env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
            )
            if done.returncode:
                pytest.skip(f"Slurm cannot be installed: {' '.join(step)}: {done.stderr[-300:]}")


@contextmanager
def started(folder: Path) -> Iterator[dict[str, str]]:
    """Start the cluster and yield the environment variables with which sbatch and its siblings reach it."""
    for name in ("state", "spool-node1", "spool-node2"):
        (folder / name).mkdir()
    conf = folder / "slurm.conf"
    # What another session's tests may have left behind must not answer in its place.
    port = free_ports(3, 17000)
    conf.write_text(
        CONF.format(host=socket.gethostname(), dir=folder, port=port, first=port + 1, last=port + 2)
    )
    (folder / "topology.conf").write_text(TOPOLOGY)
    (folder / "prolog").write_text(f"#!/bin/sh\necho print {WELCOME}\n")
    (folder / "prolog").chmod(0o755)
    subprocess.run(["service", "munge", "start"], check=True, capture_output=True)
    env = {**os.environ, "SLURM_CONF": str(conf)}
    commands = [["slurmctld", "-D", "-f", conf]] + [
        ["slurmd", "-D", "-f", conf, "-N", f"node{n}"] for n in (1, 2)
    ]
    with open(folder / "daemons.log", "w") as log:
        daemons = [subprocess.Popen(command, env=env, stdout=log, stderr=log) for command in commands]
    try:
        deadline = time.monotonic() + 60
        while (states := asked(env, "sinfo", "-h", "-o", "%T %D")) != "idle 2":
            assert time.monotonic() < deadline, states
            time.sleep(0.5)
        yield env
    finally:
        for daemon in daemons:
            daemon.terminate()
        for daemon in daemons:
            try:
                daemon.wait(20)
            except subprocess.TimeoutExpired:  # a slurmd with a job that does not end
                daemon.kill()


def asked(env: dict[str, str], *command: str) -> str:
    """Return what one of Slurm's programs prints."""
    return subprocess.run(command, env=env, capture_output=True, text=True).stdout.strip()


def facts(env: dict[str, str], job: str) -> dict[str, str]:
    """Return a job's properties as {name: value}, with the names of `scontrol show job`."""
    return dict(
        fact.split("=", 1) for fact in asked(env, "scontrol", "show", "job", job).split() if "=" in fact
    )


def ended(env: dict[str, str], job: str, seconds: float = 600.0) -> dict[str, str]:
    """Wait for the end of a job and return its properties."""
    deadline = time.monotonic() + seconds
    while (found := facts(env, job))["JobState"] not in ENDS:
        assert time.monotonic() < deadline, f"job {job} has not ended within {seconds:.0f} s"
        time.sleep(0.5)
    return found


def wait_in(env: dict[str, str], job: str, condition: Callable[[], bool], seconds: float = 600.0) -> None:
    """Wait until the condition holds. Fail if the job ends before."""
    deadline = time.monotonic() + seconds
    while not condition():
        found = facts(env, job)
        assert found["JobState"] not in ENDS, Path(found["StdOut"]).read_text()[-3000:]
        assert time.monotonic() < deadline, f"not within {seconds:.0f} s"
        time.sleep(0.5)
