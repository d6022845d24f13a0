"""Capabilities of the machines of a Ray cluster that this run joins. A task on one machine reports them."""

from dataclasses import replace

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from grpo_megatron.capabilities import Capabilities
from grpo_megatron.errors import UserError

_WHERE = "in the Ray cluster"


def capabilities_of_ray(timeout: float = 120.0) -> Capabilities:
    """Find out the hardware of the Ray cluster that this process is connected to, such as its GPUs.

    The result is used to check whether the configuration can run there. The nodes are assumed to be alike, so
    only one node with GPUs is asked, by a Ray task. The task reserves no GPU, because this run may have
    reserved all GPUs already. If Ray counts no GPUs, no node is asked, and the result has no GPUs.

    timeout: seconds to wait for the task.

    Raises UserError if the node does not answer, or if torch finds no GPU where Ray counts some.
    """
    nodes = [node for node in ray.nodes() if node["Alive"]]
    with_gpus = [node for node in nodes if node["Resources"].get("GPU")]
    if not with_gpus:
        # The machines may have GPUs that Ray was told not to use.
        return replace(Capabilities.of_facts("none", len(nodes), None), where=_WHERE)
    address = with_gpus[0]["NodeManagerAddress"]
    probe = _probe.options(
        num_cpus=0,
        scheduling_strategy=NodeAffinitySchedulingStrategy(with_gpus[0]["NodeID"], soft=False),
        # Ray hides the GPUs from a task that reserves none.
        runtime_env={"env_vars": {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}},
    ).remote()
    try:
        found = ray.get(probe, timeout=timeout)
    except ray.exceptions.GetTimeoutError as error:
        raise UserError(
            f"node {address} of the Ray cluster did not report its hardware within {timeout:.0f} s; "
            "check that the node is up"
        ) from error
    if not found.gpus:
        raise UserError(
            f"Ray counts GPUs on node {address}, but torch finds none there; check the node's driver and "
            "torch build"
        )
    per_node = {int(node["Resources"]["GPU"]) for node in with_gpus}
    return replace(
        found,
        where=_WHERE,
        nodes=len(with_gpus),
        gpus_per_node=per_node.pop() if len(per_node) == 1 else None,
    )


@ray.remote
def _probe() -> Capabilities:
    return Capabilities.of_this_machine()
