"""Ray on a machine where Python modules are slow to import. Its raylet used to end after 15 seconds."""

import os
import subprocess
import sys
import tempfile
import time

import pytest

from grpo_megatron.cluster.ports import free_ports
from tests.tools import default_signals

# Ray's agents begin this many seconds late.
LATE = 25
CONNECT = """
import ray
from grpo_megatron.cluster.ray_connection import connect
connect(None, num_slots=2)
(node,) = ray.nodes()
print("metrics at", node["MetricsAgentPort"], node["MetricsExportPort"])
ray.shutdown()
"""


@pytest.fixture
def slow(tmp_path):
    """Environment variables with which Ray's agents begin late."""
    late = f"import sys, time\nif any('agent.py' in word for word in sys.orig_argv[:4]): time.sleep({LATE})\n"
    (tmp_path / "sitecustomize.py").write_text(late)
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "a" * 64}
    return os.environ | token | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{os.getcwd()}"}


@pytest.mark.slow
def test_a_run_starts_ray_all_the_same(slow):
    done = subprocess.run(
        [sys.executable, "-c", CONNECT], env=slow, capture_output=True, text=True, timeout=200
    )
    # Without the dashboard's packages, nothing serves metrics. Another user could serve at a port that is
    # named nevertheless, and collect Ray's token.
    assert "metrics at -1 -1" in done.stdout, done.stdout + done.stderr


@pytest.fixture
def short_folder():
    """A folder for Ray's sockets, whose paths must be short."""
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder:
        yield folder


@pytest.mark.slow
def test_so_does_a_job(slow, tmp_path, short_folder):
    """Start Ray as slurm/train.sbatch does. The raylet lives while the agents begin."""
    port = free_ports(1)
    command = ["start", "--head", f"--port={port}", "--node-ip-address=127.0.0.1", "--num-cpus=1", "--block"]
    options = ["--include-dashboard=false", "--disable-usage-stats", f"--temp-dir={short_folder}/r"]
    with open(tmp_path / "out", "wb") as out:
        ray = subprocess.Popen(
            [sys.executable, "-m", "grpo_megatron.cluster.ray_command", *command, *options],
            env=slow,
            stdout=out,
            stderr=subprocess.STDOUT,
            preexec_fn=default_signals,
        )
    try:
        end = time.monotonic() + LATE + 10
        while time.monotonic() < end:
            assert ray.poll() is None, (tmp_path / "out").read_text()
            time.sleep(0.5)
        assert "Ray runtime started" in (tmp_path / "out").read_text()
    finally:
        ray.terminate()
        ray.wait(60)
