"""A real SGLang engine over two Ray nodes on this machine, with divided experts, on the nodes of the
ranks.
"""

import os
import signal

import psutil
import pytest
import ray

from grpo_megatron.cluster.processes import ProcessDied
from tests.integration.test_weight_transports import largest_mismatch, loop
from tests.integration.train_runs import metrics

# One CPU each, so that the two ranks of the engine are on two nodes.
pytestmark = pytest.mark.parametrize("two_nodes", [(1, 0)], indirect=True)

LAYOUT = (
    "cluster.placement=colocated",
    "megatron.data_parallel=2",
    "megatron.expert_parallel=2",
    "rollout.engine.tensor_parallel=2",
    "rollout.engine.expert_parallel=2",
    "rollout.temperature=1.0",
    "run.total_steps=1",
)


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["shared_memory", "groups"])
def test_weights_reach_both_nodes_and_samples_come_back(two_nodes, experts, tmp_path, transport):
    with loop(experts, tmp_path, *LAYOUT, f"weight_sync.transport={transport}") as (controller, run):
        assert len(set(run.engines.nodes)) == len(set(run.trainer.nodes)) == 2
        assert largest_mismatch(controller) < 1e-5
        run.to_ranks()
        run.trainer.weights.scale(1.1)
        assert largest_mismatch(controller) < 1e-5
        run.to_ranks()
        controller.run()
    (row,) = metrics(tmp_path, "sync")
    assert 0 < row["mismatch/max"] <= 1e-4


@pytest.mark.slow
def test_a_node_that_dies_ends_the_engine(two_nodes, experts, tmp_path):
    with loop(experts, tmp_path, *LAYOUT) as (controller, run):
        controller.rollouts.start()
        ((_, node),) = run.engines._actors._others[0].items()
        children = psutil.Process(ray.get(node.ready.remote())).children(recursive=True)
        scheduler = next(child.pid for child in children if "scheduler" in " ".join(child.cmdline()))
        os.kill(scheduler, signal.SIGKILL)
        with pytest.raises(ProcessDied, match="engine 0 died in `score`"):
            run.engines.score_on_all([[1, 2, 3, 4]])
