"""Placement: which process runs on which device.

A slot is one device of this run: a GPU or, if the run computes on CPUs, a share of a node. Ray reserves the
slots in bundles, and a bundle is on one node. Every trainer rank, and every engine's part on a node, is a Ray
actor that is bound to a bundle. Processes that must be on one node share a bundle. Slots are sorted by node
and device, so that neighbouring ranks are neighbours in hardware. A process's environment variables,
including those for libraries to preload, are set before the process starts.
"""

import logging
import os
import shutil
import socket
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from ipaddress import ip_address
from itertools import chain, groupby
from pathlib import Path

import ray
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from grpo_megatron.cluster.address import loopback_interface
from grpo_megatron.cluster.bundles import bundles, neighbouring_stages
from grpo_megatron.cluster.cpu_threads import cores_of, cores_text, threads_by_node, threads_text
from grpo_megatron.cluster.gpu_environment import conflicts, gpu_environment
from grpo_megatron.cluster.ray_connection import Needs, connect, daemons, end_ray
from grpo_megatron.cluster.ray_errors import LOST, plain
from grpo_megatron.config.schema import Config, Placement
from grpo_megatron.errors import ProcessLost, Stopped, UserError, shortened

logger = logging.getLogger(__name__)

# A label of Ray's nodes: the position of the node in the network, as an index. slurm/train.sbatch sets it.
NODE_ORDER = "node-order"


# Longest time in which a node starts a process that tells which GPUs it has.
_PROBE_SECONDS = 300.0


@dataclass(frozen=True)
class Slot:
    """One device of the run. One process uses the device, or two if ranks and engines share devices.

    bundle: index of the bundle in Ray's placement group that contains the device
    node: id of the device's Ray node
    device: index of the GPU on its node; None if the run computes on CPUs
    group: Ray's placement group that contains the bundle. None: the group reserved at the start
        (Cluster.group)
    """

    bundle: int
    node: str
    device: int | None
    group: PlacementGroup | None = field(default=None, compare=False)


class RequestedEngine:
    """A request to Ray for the devices of one engine, which may not be free yet."""

    def __init__(self, group: PlacementGroup, gpus: bool):
        self._group, self._gpus = group, gpus

    def slots(self) -> list[Slot] | None:
        """Return the slots (devices) of the engine, or None if Ray has not reserved them yet.

        The slots are sorted by node and device. Raises ProcessLost if a node does not answer or has just
        left, and UserError if Ray names GPUs by anything but indices.
        """
        if not self._group.wait(timeout_seconds=0):
            return None
        if not self.is_whole:
            raise ProcessLost("the node of the reserved devices has left the Ray cluster")
        return [replace(slot, group=self._group) for slot in _sorted(_slots(self._group, self._gpus))]

    @property
    def is_whole(self) -> bool:
        """True if all nodes of the engine's reserved devices are still in the Ray cluster."""
        nodes = set(placement_group_table(self._group)["bundles_to_node_id"].values())
        return nodes <= {node["NodeID"] for node in ray.nodes() if node["Alive"]}

    def release(self) -> None:
        remove_placement_group(self._group)


def by_node(slots: list[Slot]) -> list[list[Slot]]:
    """Return the slots (devices) of an engine as one list for each node.

    The slots of a node must be consecutive in `slots`.
    """
    return [list(own) for _, own in groupby(slots, key=lambda slot: slot.node)]


@dataclass
class Cluster:
    """The devices (slots) that Ray has reserved for this run. The end of its `with` block releases them."""

    group: PlacementGroup
    """Ray's reservation of all slots of the run."""
    rank_slots: list[Slot]
    """The slot of each trainer rank, in rank order."""
    engine_slots: list[list[Slot]]
    """One list for each engine, with a slot for each of its tensor-parallel ranks."""
    gpu_share: float = 0.0
    """Fraction of a GPU that each process reserves from Ray: 1, or less if ranks and engines share GPUs."""
    rank_threads: dict[str, int] = field(default_factory=dict)
    """{id of a node: number of intra-op threads of each trainer rank there}; empty if the run uses GPUs."""
    engine_threads: dict[str, int] = field(default_factory=dict)
    """{id of a node: number of intra-op threads of each engine rank there}; empty if the run uses GPUs."""
    _requested: list[RequestedEngine] = field(default_factory=list, repr=False)
    """Requests for engines after the start of the run."""
    _needs: Needs | None = field(default=None, repr=False)
    """Tells the guard which of Ray's daemons to watch; None if the run has joined a cluster."""
    _folder: Path | None = field(default=None, repr=False)
    """Folder with the files of the Ray cluster that this run has started; None if it has joined a cluster."""

    def options(self, slot: Slot, env: dict[str, str], devices: list[int | None] | None = None) -> dict:
        """Return the Ray actor options that bind a process to a device and set its environment variables.

        slot: the device, in a bundle of Ray's placement group.
        env: environment variables of the process. They override those that every process on a GPU gets.
        devices: indices of the GPUs that the process may see. If None, it sees only the GPU of the slot.
        """
        env = dict(env) | _loopback_variables()
        if slot.device is not None:
            env = gpu_environment(os.environ) | env
            # Ray would show the process only the devices that the process reserves. That is not enough for
            # an engine with several devices, nor for two processes that share one.
            env["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"] = "1"
            env["CUDA_VISIBLE_DEVICES"] = ",".join(str(d) for d in (devices or [slot.device]))
        return {
            "num_cpus": 0,
            "num_gpus": self.gpu_share if slot.device is not None else 0,
            "runtime_env": {"env_vars": env},
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                slot.group or self.group, placement_group_bundle_index=slot.bundle
            ),
        }

    @property
    def nodes(self) -> list[str]:
        """Ids of the nodes on which this run has processes, without duplicates."""
        slots = (slot for slots in (self.rank_slots, *self.engine_slots) for slot in slots)
        return list(dict.fromkeys(slot.node for slot in slots))

    @property
    def engine_nodes(self) -> list[list[list[Slot]]]:
        """Slots (devices) of each engine, grouped by node.

        engine_nodes[i][j] is the list of slots that engine i has on its j-th node.
        """
        return [by_node(slots) for slots in self.engine_slots]

    def request_engine(self) -> RequestedEngine:
        """Ask Ray for the devices of one more engine, of the same size as the run's first engine.

        This method does not wait until devices are free. RequestedEngine.slots tells when they are reserved.
        """
        nodes = self.engine_nodes[0]
        gpus = nodes[0][0].device is not None
        kind = "GPU" if gpus else "CPU"
        bundles = [{"CPU": len(slots)} | {kind: len(slots)} for slots in nodes]
        requested = RequestedEngine(placement_group(bundles, strategy="PACK"), gpus)
        self._requested.append(requested)
        return requested

    def divide_cores(self, config: Config) -> None:
        """Decide how many threads each trainer rank and engine rank has on CPUs, and log the numbers.

        Sets `rank_threads` and `engine_threads`, so that processes share the cores of their nodes. Only a run
        that computes on CPUs calls this.

        config: its cpu_threads settings fix the numbers of threads, or let them depend on the cores (`auto`).
        """
        engine_slots = list(chain(*self.engine_slots))
        cores = cores_of({slot.node: slot.bundle for slot in (*self.rank_slots, *engine_slots)}, self.group)
        sides = {
            "trainer rank": (config.megatron.cpu_threads, self.rank_slots),
            "engine rank": (config.rollout.engine.cpu_threads, engine_slots),
        }
        self.rank_threads, self.engine_threads = (
            threads_by_node(setting, [slot.node for slot in slots], cores, os.environ)
            for setting, slots in sides.values()
        )
        said = zip(sides, (self.rank_threads, self.engine_threads), strict=True)
        logger.info(
            ", ".join(threads_text(what, threads) for what, threads in said if threads)
            + f" ({cores_text(cores)})"
        )

    def must_be_whole(self) -> None:
        """Raise ProcessLost if a node of this run has left the Ray cluster.

        Call this before a restart, which cannot succeed without the node.
        """
        alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
        used = set(self.nodes)
        if used - alive:
            raise ProcessLost(
                f"the Ray cluster has lost {len(used - alive)} of the {len(used)} nodes of this run; start "
                "the run again on working nodes"
            )

    def __enter__(self) -> "Cluster":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(failed=kind is not None and not issubclass(kind, Stopped))

    def close(self, failed: bool = False) -> None:
        """Release the devices. If this run has started the Ray cluster, end it and delete its folder.

        failed: True if the run has failed. The folder is then kept, because it contains Ray's logs.
        """
        for requested in self._requested:
            requested.release()
        remove_placement_group(self.group)
        if self._needs:
            end_ray(self._needs)
            if self._folder and not failed:
                shutil.rmtree(self._folder, ignore_errors=True)


def _loopback_variables() -> dict[str, str]:
    """Return environment variables that make gloo and NCCL use loopback only, if Ray itself uses loopback.

    Then other machines cannot connect to the run's processes. Ray uses loopback if this run has started Ray
    on one machine. Otherwise the result is empty.
    """
    if not ip_address(ray.util.get_node_ip_address()).is_loopback:
        return {}
    # Find the interface by its kind, because no interface need have Ray's address: the first node of a job is
    # at 127.0.1.1 if Debian's /etc/hosts maps its name to that.
    interface = loopback_interface()
    # Without these, gloo and NCCL listen at the address of the machine's name.
    return {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface}


def allocate(
    config: Config, num_ranks: int, num_engines: int, timeout: float = 120.0, needs: Needs = lambda *_: None
) -> Cluster:
    """Connect to a Ray cluster or start one, and reserve devices for the trainer ranks and engines of a run.

    Returns the devices as a Cluster. Colocated engines share the devices of the ranks. Other engines get
    devices of their own. Each tensor-parallel group is on one node, except that an engine larger than a node
    fills several nodes. If this function fails, it releases the devices and ends a Ray cluster that it has
    started.

    timeout: seconds to wait until Ray has reserved the devices.
    needs: tells the guard of the run which Ray daemons to watch, if a Ray cluster is started.

    Raises UserError if the cluster cannot be joined or started, if it has too few free devices, or if its
    nodes are too small for a tensor-parallel group. Raises ProcessLost if a node does not answer.
    """
    engine_tp = config.rollout.engine.tensor_parallel
    colocated = config.cluster.placement == Placement.colocated
    total = max(num_ranks, num_engines * engine_tp) if colocated else num_ranks + num_engines * engine_tp
    # The guard watches the daemons while they start, too. ray.init would wait a minute for a dead daemon.
    needs(daemons)
    folder = connect(config.cluster.ray_address, total)
    started = folder is not None
    with ExitStack() as after_failure:
        if started:
            after_failure.callback(end_ray, needs)
        gcs_port = int(ray.get_runtime_context().gcs_address.rpartition(":")[2])
        needs(daemons if started else None, gcs_port if started else None)
        kind = "GPU" if ray.cluster_resources().get("GPU", 0) else "CPU"
        per_node = max(int(node["Resources"].get(kind, 0)) for node in ray.nodes() if node["Alive"])
        wanted = bundles(
            num_ranks, config.megatron.tensor_parallel, num_engines, engine_tp, per_node, colocated
        )
        sizes = [*wanted.ranks, *wanted.engines]
        # Ray keeps a bundle on one node.
        group = placement_group([{"CPU": size} | {kind: size} for size in sizes], strategy="PACK")
        after_failure.callback(remove_placement_group, group)
        _wait_until_reserved(group, total, sizes, timeout)
        slots = _slots(group, kind == "GPU")
        for line in conflicts(os.environ) if kind == "GPU" else ():
            logger.warning(line)
        rank_part, engine_part = _sorted(slots[: len(wanted.ranks)]), _sorted(slots[len(wanted.ranks) :])
        of_engines = engine_part or rank_part
        cluster = Cluster(
            group,
            neighbouring_stages(rank_part[:num_ranks], config.megatron, per_node),
            [of_engines[index * engine_tp : (index + 1) * engine_tp] for index in range(num_engines)],
            gpu_share=0.45 if colocated else 1.0,
            _needs=needs if started else None,
            _folder=folder,
        )
        if kind == "CPU":
            cluster.divide_cores(config)
        after_failure.pop_all()
    return cluster


def _wait_until_reserved(group: PlacementGroup, total: int, sizes: list[int], timeout: float) -> None:
    """Wait until Ray has reserved all bundles of a placement group.

    total: number of devices that the run needs, for the message.
    sizes: number of devices of each bundle, for the message.
    timeout: seconds.

    Raises UserError if Ray has not reserved them within `timeout`.
    """
    if not group.wait(timeout):
        have = {k: v for k, v in ray.cluster_resources().items() if k in ("CPU", "GPU")}
        raise UserError(
            f"too few devices were free within {timeout:.0f} s: this run needs {total}, in groups of "
            f"{', '.join(map(str, sorted(set(sizes))))} that are each on one node, and the Ray cluster has "
            f"{have} in total. Wait for other runs to end, add nodes, or choose smaller parallel sizes"
        )


def _slots(group: PlacementGroup, gpus: bool) -> list[list[Slot]]:
    """Return the slots (devices) of each bundle of a reserved placement group, as one list for each bundle.

    gpus: True if the devices are GPUs. A Ray task in each bundle then reports which GPUs the bundle has.

    Raises UserError if Ray names GPUs by anything but indices. Raises ProcessLost if a node does not answer.
    """
    nodes, sizes = (
        placement_group_table(group)["bundles_to_node_id"],
        [int(bundle["CPU"]) for bundle in group.bundle_specs],
    )
    devices: list[list[int | None]] = [[None] * size for size in sizes]
    if gpus:
        probes = [
            _visible_devices.options(
                num_gpus=size,
                num_cpus=0,
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=i),
            ).remote()
            for i, size in enumerate(sizes)
        ]
        try:
            devices = ray.get(probes, timeout=_PROBE_SECONDS)
        except ray.exceptions.RayTaskError as error:
            raise error.cause if isinstance(error.cause, UserError) else error from None
        except LOST as error:
            raise ProcessLost(
                "a node did not report which GPUs it has; check that it is up: "
                f"{shortened(plain(error), 300)}"
            ) from error
    return [[Slot(i, nodes[i], device) for device in own] for i, own in enumerate(devices)]


def _sorted(of_bundles: list[list[Slot]]) -> list[Slot]:
    """Return the slots (devices) of all bundles in one list, sorted by node and device.

    Nodes are sorted by their label NODE_ORDER (position in the network) if they have one, else by address.
    The slots of a bundle that is smaller than the first bundle come last. Elsewhere, they would shift the
    following ranks, and tensor-parallel groups would span two bundles.

    of_bundles: the slots of each bundle.
    """
    if not of_bundles:
        return []
    alive = [node for node in ray.nodes() if node["Alive"]]  # Ray also lists nodes that have left
    address = {node["NodeID"]: node["NodeManagerAddress"] for node in alive}
    order = {node["NodeID"]: int(node["Labels"].get(NODE_ORDER, 0)) for node in alive}

    def numeric(ip: str) -> tuple:
        return tuple(int(part) for part in ip.split(".")) if ip.replace(".", "").isdigit() else (ip,)

    def place(slot: Slot) -> tuple:
        device = -1 if slot.device is None else slot.device
        missing = len(of_bundles[0]) - size[slot.bundle]
        return missing, order[slot.node], numeric(address[slot.node]), slot.node, device, slot.bundle

    size = {bundle[0].bundle: len(bundle) for bundle in of_bundles}
    return sorted((slot for bundle in of_bundles for slot in bundle), key=place)


@ray.remote(max_calls=0)  # the task does not compute on the GPU, so its process may be reused
def _visible_devices() -> list[int]:
    """Return the indices of the GPUs on this node that Ray has assigned to this task.

    Raises UserError if Ray names GPUs by anything but their indices.
    """
    devices = ray.get_gpu_ids()
    if not all(str(device).isdecimal() for device in devices):
        raise UserError(
            f"CUDA_VISIBLE_DEVICES on node {socket.gethostname()} must contain GPU numbers, but is "
            f"{','.join(map(str, devices))}; ask the scheduler for whole GPUs, or set CUDA_VISIBLE_DEVICES "
            "to their numbers before Ray starts"
        )
    return sorted(map(int, devices))
