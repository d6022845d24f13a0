import os
import shutil
from unittest.mock import patch

import pytest

# Its patches must be installed before a module of this package imports Megatron, whatever is collected first.
# Not in __init__.py, which SGLang's processes import with the functions that tests call there.
import grpo_megatron.megatron  # noqa: F401
from tests.ranks import rank_pool

SLOTS = 16


# A Ray that the tests of a folder share ends with the last of them. Ray's processes never sleep for long:
# idle, they were seen to take a quarter of a slow machine.
@pytest.fixture(scope="package")
def ray_here():
    """One Ray for all tests that need one. Runs join it instead of starting their own."""
    import ray

    from grpo_megatron.cluster.ray_connection import connect

    # Afterwards without what Ray was started with: other tests would have its token, and its patience.
    with patch.dict(os.environ):
        folder = connect(None, num_slots=SLOTS)
        yield
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="package")
def places(ray_here, tmp_path_factory):
    """A function places(n) that returns places for n reward workers."""
    import ray

    from grpo_megatron.cluster.worker_pool import worker_places

    logs = tmp_path_factory.mktemp("reward_workers")
    return lambda number: worker_places([ray.get_runtime_context().get_node_id()], number, str(logs))


@pytest.fixture(scope="package")
def ranks():
    with rank_pool() as pool:
        yield pool


@pytest.fixture(scope="module")
def two_nodes(request):
    """A Ray cluster of two nodes on this machine, which replaces the other one meanwhile.

    request.param: CPUs and GPUs that each node declares.
    """
    import ray
    from ray.cluster_utils import Cluster

    from grpo_megatron.cluster.ray_connection import connect

    another = ray.is_initialized()
    if another:
        ray.shutdown()
    cpus, gpus = request.param
    node = {"num_cpus": cpus, "num_gpus": gpus, "object_store_memory": 80 * 2**20}
    cluster = Cluster(initialize_head=True, head_node_args=node | {"include_dashboard": False})
    try:
        cluster.add_node(**node)
        connect(cluster.address, num_slots=0)
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()
        if another:
            connect(None, num_slots=SLOTS)


@pytest.fixture(scope="session")
def arithmetic(tmp_path_factory):
    """Folder with the tiny model and a small arithmetic task: model/, data/*.jsonl."""
    from make_arithmetic import make as make_task
    from make_tiny_model import make as make_model

    root = tmp_path_factory.mktemp("arithmetic")
    make_model(root / "model", hidden=64, ffn=128, seed=3)
    make_task(root / "data", seed=0, held_out=16, wrong=0.5, copies=1)
    return root


@pytest.fixture(scope="session")
def experts(tmp_path_factory, arithmetic):
    """The same as `arithmetic`, with a model of 4 experts per layer."""
    from make_tiny_model import make

    root = tmp_path_factory.mktemp("experts")
    make(root / "model", hidden=64, ffn=64, layers=2, seed=4, experts=4)
    (root / "data").symlink_to(arithmetic / "data")
    return root
