"""Check that a run's machines can do what is configured, and that the section `cluster` describes them."""

from grpo_megatron.capabilities import Capabilities
from grpo_megatron.cluster.probe import capabilities_of_ray
from grpo_megatron.cluster.ray_connection import connect
from grpo_megatron.config.command import Command
from grpo_megatron.config.schema import Config
from grpo_megatron.errors import UserError
from grpo_megatron.preflight.cluster_rules import CLUSTER


def check_cluster(config: Config, command: Command) -> None:
    """Check that the machines of a run can do what is configured.

    All rules about machines must hold, and the section `cluster` must describe the machines correctly. If
    cluster.ray_address is set, this process joins that Ray cluster, stays connected, and asks about its
    machines. Otherwise this machine is examined.

    Raises UserError with all violations, or if the Ray cluster cannot be joined.
    """
    address = config.cluster.ray_address
    if address is not None:
        connect(address, num_slots=0)
    found = Capabilities.of_this_machine() if address is None else capabilities_of_ray()
    found = found.emulating(config.megatron.emulate_kernels)
    broken = contradictions(config, found) + CLUSTER.violations(config, found, command=command)
    if broken:
        raise UserError(
            "this configuration does not fit the cluster; change it to meet these requirements:\n"
            + "\n".join(f"  - {rule}" for rule in broken)
        )


def contradictions(config: Config, found: Capabilities) -> list[str]:
    """Return one sentence for each setting of the section `cluster` that describes the machines wrongly.

    cluster.gpu, cluster.nodes and cluster.gpus_per_node are compared with the machines. It is no error if the
    machines have more nodes or GPUs than these settings say.

    found: actual capabilities of the machines.
    """
    cluster = config.cluster
    said = Capabilities.of_facts(cluster.gpu, cluster.nodes, cluster.gpus_per_node)
    wrong = []
    if said.gpus is not None and said.gpus != found.gpus:
        wrong.append(
            f"cluster.gpu={cluster.gpu}, but there are {'GPUs' if found.gpus else 'no GPUs'} {found.where}; "
            "correct or remove the setting"
        )
    elif said.gpu and found.gpu and said.gpu.compute_capability != found.gpu.compute_capability:
        major, minor = found.gpu.compute_capability
        wrong.append(
            f"cluster.gpu={cluster.gpu}, but the GPUs {found.where} have compute capability "
            f"{major}.{minor}; correct or remove the setting"
        )
    # The machines may have more nodes or GPUs than the settings state.
    for name in ("nodes", "gpus_per_node"):
        fact, have = getattr(said, name), getattr(found, name)
        if fact is not None and have is not None and have < fact:
            wrong.append(
                f"cluster.{name}={fact}, but only {have} found {found.where}; correct or remove the setting"
            )
    return wrong
