"""Ray: connecting, and deciding which process runs on which device.

One process model for CPU and GPU: every trainer rank and every engine (each node's part of it) is a Ray actor
bound to one bundle of a placement group. What must be on one node shares a bundle, and slots are sorted by node and
device, so that neighbouring ranks are neighbours in hardware. What a process must find in its environment is set before it
starts; libraries that must be preloaded can be.
"""

import contextlib
import os
import secrets
import shutil
import signal
import socket
import threading
import time
from dataclasses import dataclass, field
from ipaddress import ip_address
from itertools import chain, groupby
from math import lcm
from pathlib import Path

import psutil
import ray
from ray._private import ray_constants, services
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from grpo_megatron.cluster.address import loopback_interface
from grpo_megatron.cluster.bundles import bundles
from grpo_megatron.cluster.cpu_threads import cores_of, cores_text, threads_by_node, threads_text
from grpo_megatron.cluster.gpu_environment import conflicts, gpu_environment
from grpo_megatron.cluster.joining import own_folder, refusals_said
from grpo_megatron.cluster.ray_errors import LOST, plain
from grpo_megatron.config.schema import Config, Placement
from grpo_megatron.errors import ProcessLost, Stopped, UserError, shortened
from grpo_megatron.model.parallel_sizes import ParallelSizes
from grpo_megatron.monitoring.terminal import say
from grpo_megatron.run.guard import Guard

# A label of Ray's nodes: a node's place in the network, among the others'. slurm/train.sbatch sets it.
NODE_ORDER = "node-order"
# Importing Python's modules takes minutes where they come from a slow file system, or many share the processors.
START_SECONDS = 300
# Of a Ray that is started here, unless the environment says otherwise; slurm/train.sbatch has them, too.
_SETTINGS = {
    # At Ray's own 15, whatever has the lowest priority of all, as the sandbox's helpers have, still takes a third of the engines'.
    "RAY_worker_niceness": "0",
    # It would start a Python process for each processor, to which no work of ours ever goes: all our actors have environments of their
    # own. Where these processes were slow to start, ray.init did not return.
    "RAY_prestart_worker_first_driver": "0",
    # Ray's own are half a minute, or a minute.
    "RAY_gcs_server_port_wait_time_s": f"{START_SECONDS}",
    "RAY_raylet_start_wait_time_s": f"{START_SECONDS}",
    "RAY_agent_register_timeout_ms": f"{START_SECONDS * 1000}",
    "RAY_worker_register_timeout_seconds": f"{START_SECONDS}",
}
# What the user may have said of Ray's token. Without the first Ray asks for one where it is started here.
_ASKED_FOR = {"RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"}


@dataclass(frozen=True)
class Slot:
    """One device (None: a CPU): its bundle's index in the placement group, its node, and its number there."""

    bundle: int
    node: str
    device: int | None


@dataclass
class Cluster:
    """A connection to Ray and the slots of this run. Close it when done."""

    group: PlacementGroup
    rank_slots: list[Slot]
    engine_slots: list[list[Slot]]
    """One list for each engine, with a slot for each of its tensor-parallel ranks."""
    gpu_share: float = 0.0
    """Share of a device that Ray accounts to each process on it."""
    rank_threads: dict[str, int] = field(default_factory=dict)
    """Intra-op threads of each trainer rank by node, on CPUs."""
    engine_threads: dict[str, int] = field(default_factory=dict)
    """Intra-op threads of each engine rank by node, on CPUs."""
    _guard: Guard | None = field(default=None, repr=False)  # who watches the Ray that this run has started
    _folder: Path | None = field(default=None, repr=False)  # of that Ray's files

    def options(self, slot: Slot, env: dict[str, str], devices: list[int | None] | None = None) -> dict:
        """Return the Ray actor options that bind a process to `slot`.

        env: variables that the process needs beside those of every process on a GPU, see gpu_environment.
        devices: GPU ids the process may see (default: the slot's own).
        """
        env = dict(env) | _loopback_alone()
        if slot.device is not None:
            env = gpu_environment(os.environ) | env
            # Ray would show the process only what it accounts to it: not enough for an engine over
            # several devices, nor for two processes that share one.
            env["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"] = "1"
            env["CUDA_VISIBLE_DEVICES"] = ",".join(str(d) for d in (devices or [slot.device]))
        return {
            "num_cpus": 0,
            "num_gpus": self.gpu_share if slot.device is not None else 0,
            "runtime_env": {"env_vars": env},
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                self.group, placement_group_bundle_index=slot.bundle
            ),
        }

    @property
    def nodes(self) -> list[str]:
        """Ids of the nodes of this run, each once."""
        slots = (slot for slots in (self.rank_slots, *self.engine_slots) for slot in slots)
        return list(dict.fromkeys(slot.node for slot in slots))

    @property
    def engine_nodes(self) -> list[list[list[Slot]]]:
        """For each engine, its slots on each of its nodes."""
        return [
            [
                list(slots) for _, slots in groupby(engine, key=lambda slot: slot.node)
            ]  # slots of a node are neighbours
            for engine in self.engine_slots
        ]

    def divide_cores(self, config: Config) -> None:
        """Set the threads of ranks and engines from the cores of their nodes, and say how many there are."""
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
        say(
            ", ".join(threads_text(what, threads) for what, threads in said if threads)
            + f" ({cores_text(cores)})"
        )

    def must_be_whole(self) -> None:
        """Raises ProcessLost if a node of these slots is gone."""
        alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
        used = set(self.nodes)
        if used - alive:
            raise ProcessLost(
                f"{len(used - alive)} of the {len(used)} nodes of this run have left the Ray cluster; start it again on whole nodes"
            )

    def __enter__(self) -> "Cluster":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(failed=kind is not None and not issubclass(kind, Stopped))

    def close(self, failed: bool = False) -> None:
        """Give the slots back, and end the Ray that this run has started.

        failed: its logs stay where they are.
        """
        remove_placement_group(self.group)
        if self._guard:
            _end_ray(self._guard)
            if self._folder and not failed:
                shutil.rmtree(self._folder, ignore_errors=True)


def _loopback_alone() -> dict[str, str]:
    """Environment of a process that talks to others on this machine alone; empty where Ray is not on loopback."""
    if not ip_address(ray.util.get_node_ip_address()).is_loopback:
        return {}
    # No interface need have the address itself: the first node of a job is at 127.0.1.1 where Debian's /etc/hosts has its name there.
    interface = loopback_interface()
    # Else gloo and NCCL listen where the machine's name leads to.
    return {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface}


def connect(address: str | None, num_slots: int) -> Path | None:
    """Join the Ray cluster at `address`, or start one here.

    Return the folder of the files of one that it started.

    All signal handlers stay as they are. Raises UserError where nobody answers at the address, the cluster
    lets nobody in, or Ray cannot have its files here.
    """
    if ray.is_initialized():
        return None
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    common = {"log_to_driver": False, "logging_level": "error", "include_dashboard": False}
    folder = None
    if not address:
        folder = own_folder()
        common["_temp_dir"] = str(folder / "r")
        # Processes share the machine's cores, so slots, not cores, are what is counted here.
        common["num_cpus"] = max(num_slots, os.cpu_count() or 1)
        for variable, value in _SETTINGS.items():
            os.environ.setdefault(variable, value)
        # Ray's name for listening on loopback alone; what it starts here, nobody else needs to reach.
        ray_constants.ENABLE_RAY_CLUSTER = False
        # Other users of the machine reach its loopback. Ray would write a token into ~/.ray/auth_token, which everybody may read who can
        # enter that home, and fails where it cannot write there. What it starts inherits this one.
        if not _ASKED_FOR & os.environ.keys():
            os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    else:
        del common["include_dashboard"]
    ray._private.worker.print_to_stdstream = _into_the_log  # there is no setting for it
    try:
        with _handlers_stay(), _raylet_has_time(), refusals_said(address):
            ray.init(address=address or "local", **common)
    except BaseException:
        if folder:
            with contextlib.suppress(OSError):  # it has logs, which may tell why
                folder.rmdir()
        raise
    return folder


def _into_the_log(data: dict, ignore_prefix: bool) -> None:
    """What Ray prints on stdout of deaths, in paragraphs: we say it ourselves. Python's stderr may be a terminal, descriptor 2 is a log
    where the run has a keeper."""
    os.write(2, "".join(f"(ray) {line}\n" for line in data["lines"]).encode("utf-8", "backslashreplace"))


@contextlib.contextmanager
def _handlers_stay():
    """ray.init takes SIGTERM for itself, in Python at several moments and in C++: a request to stop was lost, or ended in SIGABRT."""
    utils, handler = ray._private.utils, signal.getsignal(signal.SIGTERM)
    setting = utils.set_sigterm_handler
    utils.set_sigterm_handler = lambda handler: None
    try:
        yield
    finally:
        utils.set_sigterm_handler = setting
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)


@contextlib.contextmanager
def _raylet_has_time():
    """For how long ray.init asks for the node that it starts is a number in its code."""
    ask, until = services.get_node, time.monotonic() + START_SECONDS

    def ask_again(*arguments):
        while True:
            try:
                return ask(*arguments)
            except RuntimeError:  # it is not known yet
                if time.monotonic() > until or not _raylet_runs():
                    raise
            time.sleep(0.1)

    services.get_node = ask_again
    try:
        yield
    finally:
        services.get_node = ask


def _end_ray(guard: Guard) -> None:
    guard.needs(None)
    ray.shutdown()


def _daemons() -> list[psutil.Process]:
    """Of the Ray that this process has started, or is starting."""
    found = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):  # ray.init starts many that end at once
            if child.name() in ("raylet", "gcs_server"):
                found.append(child)
    return found


def _raylet_runs() -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return any(
            daemon.name() == "raylet" and daemon.status() != psutil.STATUS_ZOMBIE for daemon in _daemons()
        )
    return False


def allocate(
    config: Config, num_ranks: int, num_engines: int, timeout: float = 120.0, guard: Guard | None = None
) -> Cluster:
    """Reserve slots for trainer ranks and engines. guard: told what to watch, if this starts Ray.

    Colocated engines use the first ranks' slots; separate ones get their own. A tensor-parallel group of ranks is on one node, and
    so is an engine, unless it is larger than a node: then it has several to itself. Raises UserError if the cluster is too small,
    or its nodes are.
    """
    engine_tp = config.rollout.engine.tensor_parallel
    colocated = config.cluster.placement == Placement.colocated
    total = max(num_ranks, num_engines * engine_tp) if colocated else num_ranks + num_engines * engine_tp
    guard = guard or Guard()
    guard.needs(_daemons)  # from here on: ray.init waits for a minute for one that dies
    folder = connect(config.cluster.ray_address, total)
    started = folder is not None
    gcs_port = int(ray.get_runtime_context().gcs_address.rpartition(":")[2])
    guard.needs(_daemons if started else None, gcs_port if started else None)
    kind = "GPU" if ray.cluster_resources().get("GPU", 0) else "CPU"
    group = None
    try:
        per_node = max(int(node["Resources"].get(kind, 0)) for node in ray.nodes() if node["Alive"])
        wanted = bundles(
            num_ranks, config.megatron.tensor_parallel, num_engines, engine_tp, per_node, colocated
        )
        sizes = [*wanted.ranks, *wanted.engines]
        # Ray keeps a bundle on one node.
        group = placement_group([{"CPU": size} | {kind: size} for size in sizes], strategy="PACK")
        if not group.wait(timeout):
            have = {k: v for k, v in ray.cluster_resources().items() if k in ("CPU", "GPU")}
            raise UserError(
                f"this run needs {total} devices, in groups of {', '.join(map(str, sorted(set(sizes))))} that are each on one node; "
                f"the Ray cluster has {have} in all and did not free them within {timeout:.0f} s"
            )
        slots = _slots(group, kind == "GPU")
        for line in conflicts(os.environ) if kind == "GPU" else ():
            say(line)
    except BaseException:
        if group is not None:
            remove_placement_group(group)
        if started:
            _end_ray(guard)
        raise
    rank_part, engine_part = _sorted(slots[: len(wanted.ranks)]), _sorted(slots[len(wanted.ranks) :])
    of_engines = engine_part or rank_part
    engines = [of_engines[number * engine_tp : (number + 1) * engine_tp] for number in range(num_engines)]
    rank_slots = neighbouring_stages(
        rank_part[:num_ranks], ParallelSizes.from_config(config.megatron), per_node
    )
    cluster = Cluster(
        group,
        rank_slots,
        engines,
        gpu_share=0.45 if colocated else 1.0,
        _guard=guard if started else None,
        _folder=folder,
    )
    if kind == "CPU":
        cluster.divide_cores(config)
    return cluster


def _slots(group: PlacementGroup, gpus: bool) -> list[list[Slot]]:
    """Of each bundle."""
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
            devices = ray.get(probes)
        except ray.exceptions.RayTaskError as error:
            raise error.cause if isinstance(error.cause, UserError) else error from None
        except LOST as error:
            raise ProcessLost(
                f"a node did not say which GPUs it has: {shortened(plain(error), 300)}"
            ) from error
    return [[Slot(i, nodes[i], device) for device in own] for i, own in enumerate(devices)]


def neighbouring_stages(slots: list, sizes: ParallelSizes, per_node: int) -> list:
    """Slots in the order of their nodes, as the ranks take them: pipeline stages of a replica are on neighbouring nodes.

    Megatron numbers the ranks stage by stage, so that all replicas' first stages would come before any second one. Whole nodes
    change places, and whole groups of ranks that share experts, which exchange more than stages do. Where these do not divide a stage
    the order stays as it is.
    """
    of_stage = sizes.world_size // sizes.pp
    block = lcm(sizes.tp * sizes.cp, sizes.ep * sizes.etp, per_node)
    if len(slots) != sizes.world_size or of_stage % block:
        return slots
    stages, replicas = range(sizes.pp), range(of_stage // block)
    firsts = [(replica * sizes.pp + stage) * block for stage in stages for replica in replicas]
    return [slot for first in firsts for slot in slots[first : first + block]]


def _sorted(of_bundles: list[list[Slot]]) -> list[Slot]:
    """By node (NODE_ORDER where there is one, else the address) and device.

    A last bundle that is smaller than the others stays last: before them it would shift their groups.
    """
    if not of_bundles:
        return []
    address = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    order = {node["NodeID"]: int(node["Labels"].get(NODE_ORDER, 0)) for node in ray.nodes()}

    def numeric(ip: str) -> tuple:
        return tuple(int(part) for part in ip.split(".")) if ip.replace(".", "").isdigit() else (ip,)

    def place(slot: Slot) -> tuple:
        device = -1 if slot.device is None else slot.device
        missing = len(of_bundles[0]) - size[slot.bundle]
        return missing, order[slot.node], numeric(address[slot.node]), slot.node, device, slot.bundle

    size = {bundle[0].bundle: len(bundle) for bundle in of_bundles}
    return sorted((slot for bundle in of_bundles for slot in bundle), key=place)


@ray.remote(max_calls=0)  # uses no GPU, so its process may serve again
def _visible_devices() -> list[int]:
    devices = ray.get_gpu_ids()
    if not all(str(device).isdecimal() for device in devices):
        raise UserError(
            f"CUDA_VISIBLE_DEVICES on node {socket.gethostname()} names GPUs as {', '.join(map(str, devices))}; they must be numbers: "
            "ask the scheduler for whole GPUs, or set CUDA_VISIBLE_DEVICES to their numbers before Ray starts"
        )
    return sorted(map(int, devices))
