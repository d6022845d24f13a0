"""Thread counts of the processes that compute on CPUs.

In synchronous training, trainer ranks and engines work alternately: engines generate, then ranks train. So
each side may use all cores of a node while the other one waits.
"""

import math
import os
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType

import ray
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

AUTO = "auto"
# File with the CPU quota of a container (control groups, version 2). It has two values: the CPU time that the
# container may use in each period (microseconds, or `max`), and the length of the period (microseconds).
_QUOTA = Path("/sys/fs/cgroup/cpu.max")


def usable_cores() -> int:
    """Return how many CPU cores this process may use, as its CPU affinity and its container's quota allow."""
    cores = len(os.sched_getaffinity(0))
    try:
        quota, period = _QUOTA.read_text(encoding="ascii").split()
    except (OSError, ValueError):  # no control group of version 2 at this place
        return cores
    return cores if quota == "max" else min(cores, max(1, math.floor(int(quota) / int(period))))


def openmp_variables(threads: int) -> dict[str, str]:
    """Return the OpenMP environment variables for a trainer rank or an engine that computes on CPUs.

    threads: number of threads that the process may use for one operator.
    """
    return {
        "OMP_NUM_THREADS": str(threads),
        # Threads that spin while they wait for work take cores from the run's other processes and from
        # everything else on the machine.
        "OMP_WAIT_POLICY": "passive",
        # Waiting threads may spin for some microseconds, because small operators follow each other faster
        # than a sleeping thread wakes up. This saves a tenth of the time of a step.
        "GOMP_SPINCOUNT": "1000",
    }


@ray.remote
def _usable_cores() -> int:
    return usable_cores()


def cores_of(bundle_on: Mapping[str, int], group: PlacementGroup) -> dict[str, int]:
    """Return {node id: number of CPU cores that processes on this node may use}.

    A Ray task on each node counts the cores, except on this process's own node.

    bundle_on: {node id: index of a bundle of `group` on this node}. The task of the node runs in this bundle.
    group: Ray's placement group of the run.
    """
    here = ray.get_runtime_context().get_node_id()  # asking another process would take a second
    asked = {
        node: _usable_cores.options(
            num_cpus=0,
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle),
        ).remote()
        for node, bundle in bundle_on.items()
        if node != here
    }
    return {node: ray.get(asked[node]) if node in asked else usable_cores() for node in bundle_on}


def threads_by_node(
    setting: str,
    nodes: Iterable[str],
    cores: Mapping[str, int],
    environ: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, int]:
    """Return {node: number of threads for each process on this node}.

    Call this once for the trainer ranks and once for the engine ranks. The two kinds do not compute at the
    same time, so each call divides all cores of a node among the node's processes of one kind.

    setting: value of cpu_threads in the configuration: a number as text, or `auto`. `auto` means
        OMP_NUM_THREADS if `environ` has it, else the node's cores divided by the number of its processes. Of
        a list in OMP_NUM_THREADS, such as 8,4, the first number counts, as in OpenMP's outermost loops.
    nodes: the node of each process. A node with several processes occurs several times.
    cores: {node: number of usable cores}.
    environ: environment variables of the driver.
    """
    processes = Counter(nodes)
    if setting == AUTO:
        setting = environ.get("OMP_NUM_THREADS", AUTO).split(",")[0].strip()
    if setting.isdecimal() and int(setting):
        return dict.fromkeys(processes, int(setting))
    return {node: max(1, cores[node] // count) for node, count in processes.items()}


def threads_text(what: str, threads: Mapping[str, int]) -> str:
    """Describe the number of threads for the log, such as `2 threads for each trainer rank`.

    what: name of a process, such as `trainer rank`.
    threads: {node: number of threads of each process}. If the numbers differ, the text has their range.
    """
    count = _range(threads)
    return f"{count} thread{'' if count == '1' else 's'} for each {what}"


def cores_text(cores: Mapping[str, int]) -> str:
    """Describe the number of cores for the log, such as `8 usable cores on each node`.

    cores: {node: number of cores}. If the numbers differ, the text has their range.
    """
    count = _range(cores)
    return f"{count} usable core{'' if count == '1' else 's'} on each node"


def _range(numbers: Mapping[str, int]) -> str:
    least, most = min(numbers.values()), max(numbers.values())
    return str(least) if least == most else f"{least} to {most}"
