"""Reports of a Ray cluster about its machines, and settings that are refused there."""

import os
import subprocess
import sys

import pytest
import torch

SCRIPT = """
import ray, sys
from grpo_megatron.config.command import Command
from grpo_megatron.cluster.probe import capabilities_of_ray
from grpo_megatron.config.load import read_config
from grpo_megatron.errors import UserError
from grpo_megatron.preflight.cluster import check_cluster
context = ray.init(address="local", num_cpus=1, num_gpus=int(sys.argv[1]), include_dashboard=False, \
log_to_driver=False)
try:
    found = capabilities_of_ray()
    print("found", found.where, found.gpus, found.nodes, found.gpus_per_node, found.fp8_problem)
    address = f"cluster.ray_address={context.address_info['gcs_address']}"
    for overrides in ([], sys.argv[2:]):
        check_cluster(read_config(None, ["model.path=m", address, *overrides]), Command.train)
        print("allowed")
except UserError as error:
    print("error", error)
"""


def probe(gpus: int, *overrides: str) -> list[str]:
    """Return what the script prints in a process of its own, because this one may be connected to another
    cluster.
    """
    command = [sys.executable, "-c", SCRIPT, str(gpus), *overrides]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.slow
def test_a_cluster_without_gpus_that_was_described_with_some():
    assert probe(0, "cluster.gpu=h200", "cluster.nodes=2", "megatron.precision=fp8") == [
        "found in the Ray cluster False 1 None TransformerEngine needs CUDA, which is not available",
        "allowed",
        "error this configuration does not fit the cluster; change it to meet these requirements:",
        "  - cluster.gpu=h200, but there are no GPUs in the Ray cluster; correct or remove the setting",
        "  - cluster.nodes=2, but only 1 found in the Ray cluster; correct or remove the setting",
        "  - megatron.precision=fp8 needs TransformerEngine and GPUs that support FP8; otherwise set "
        "megatron.precision=bf16 (in the Ray cluster: TransformerEngine needs CUDA, which is not available)",
    ]


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="is about a machine without a GPU")
def test_gpus_that_ray_counts_and_torch_does_not_find():
    """The task runs on the node that declares GPUs, and its report counts."""
    (text,) = probe(1)
    assert text.startswith("error Ray counts GPUs on node ")
    assert text.endswith("but torch finds none there; check the node's driver and torch build")


# A run starts Ray, and another user of the machine, who has a home of his own, tries to join it.
OWNER = """
import os, subprocess, sys
from pathlib import Path
import ray
from grpo_megatron.cluster.ray_connection import connect
before = set(os.environ)
assert connect(None, 2)
token = os.environ["RAY_AUTH_TOKEN"]
print("ran", ray.get(ray.remote(lambda: len(os.environ["RAY_AUTH_TOKEN"])).remote()))
session = Path(ray._private.worker._global_node.get_session_dir_path())
files = [path for path in session.rglob("*") if path.is_file()]
assert len(files) > 5
print("written", [path.name for path in files if token.encode() in path.read_bytes()], \
os.path.exists(os.environ["HOME"] + "/.ray"))
address = ray.get_runtime_context().gcs_address
others = {name: value for name, value in os.environ.items() if name in before}
print(subprocess.run([sys.executable, "-c", sys.argv[1], address], env=others, stdout=subprocess.PIPE, \
text=True).stdout)
ray.shutdown()
assert connect(None, 2)
print("ran again", ray.get(ray.remote(lambda: 3).remote()))
ray.shutdown()
"""
STRANGER = """
import sys
from ray._private import ray_constants
from grpo_megatron.cluster.ray_connection import connect
from grpo_megatron.errors import UserError
ray_constants.ENABLE_RAY_CLUSTER = False
try:
    print("joined", connect(sys.argv[1], 0))
except UserError as error:
    print("refused", error)
"""


@pytest.mark.slow
def test_another_user_of_the_machine_cannot_join_the_ray_of_a_run(tmp_path):
    """Each run has a token of its own. Ray's own was in ~/.ray, where others may read it."""
    # Without this process's settings of Ray, which it may have started: with them, a stranger would ask for
    # 300 s.
    env = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")} | {
        "HOME": str(tmp_path)
    }
    done = subprocess.run(
        [sys.executable, "-c", OWNER, STRANGER], env=env, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    ran, written, refused, again = filter(None, done.stdout.splitlines())
    assert (ran, written, again) == ("ran 64", "written [] False", "ran again 3")
    assert refused.startswith("refused the Ray cluster at cluster.ray_address=127.0.0.1:")
    assert "requires a token" in refused
