import sys

import pytest

sys.path.insert(0, "tools")


@pytest.fixture(scope="session")
def ray_here():
    """One Ray for all integration tests; runs join it in place of starting their own."""
    import ray

    from grpo_megatron.cluster.placement import connect

    connect(None, num_slots=16)
    yield
    ray.shutdown()


@pytest.fixture(scope="session")
def arithmetic(tmp_path_factory):
    """Folder with the tiny model and a small arithmetic task: model/, data/*.jsonl."""
    from make_arithmetic import make as make_task
    from make_tiny_model import make as make_model

    root = tmp_path_factory.mktemp("arithmetic")
    make_model(root / "model", hidden=64, ffn=128, seed=3)
    make_task(root / "data", seed=0, held_out=16, wrong=0.5, copies=1)
    return root
