"""Ray: connecting, and deciding which process runs on which device.

One process model for CPU and GPU: every trainer rank and every engine is a Ray actor bound to one
bundle of a placement group. Bundles are sorted by node and device, so that neighbouring ranks (a TP
group) are neighbours in hardware. What a process must find in its environment is set before it
starts; libraries that must be preloaded can be.
"""

import os
from dataclasses import dataclass, field

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from grpo_megatron.config.schema import Config, Placement
from grpo_megatron.errors import UserError


@dataclass(frozen=True)
class Slot:
    """One bundle: its index in the placement group, its node, and its device there (None: CPU)."""

    bundle: int
    node: str
    device: int | None


@dataclass
class Cluster:
    """A connection to Ray and the slots of this run. Close it when done."""

    group: PlacementGroup
    rank_slots: list[Slot]
    engine_slots: list[list[Slot]]  # one list per engine, a slot per TP rank in it
    gpu_share: float = 0.0
    _started: bool = field(default=False, repr=False)

    def options(self, slot: Slot, env: dict[str, str], devices: list[int] | None = None) -> dict:
        """Ray actor options that bind a process to `slot`.

        devices: GPU ids the process may see (default: the slot's own).
        """
        env = dict(env)
        if slot.device is not None:
            # Ray would show the process only what it accounts to it: not enough for an engine over
            # several devices, nor for two processes that share one.
            env["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"] = "1"
            env["CUDA_VISIBLE_DEVICES"] = ",".join(str(d) for d in (devices or [slot.device]))
        return {
            "num_cpus": 0,
            "num_gpus": self.gpu_share if slot.device is not None else 0,
            "runtime_env": {"env_vars": env},
            "scheduling_strategy": PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=slot.bundle),
        }

    def close(self) -> None:
        remove_placement_group(self.group)
        if self._started:
            ray.shutdown()


def connect(address: str | None, num_slots: int) -> bool:
    """Join the Ray cluster at `address`, or start one here; True if this call started it."""
    if ray.is_initialized():
        return False
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    common = {"log_to_driver": False, "logging_level": "error", "include_dashboard": False}
    if address:
        del common["include_dashboard"]
        ray.init(address=address, **common)
        return False
    # Processes share the machine's cores, so slots, not cores, are what is counted here.
    ray.init(address="local", num_cpus=max(num_slots, os.cpu_count() or 1), **common)
    return True


def allocate(config: Config, num_ranks: int, num_engines: int, timeout: float = 120.0) -> Cluster:
    """Reserve slots for trainer ranks and engines.

    Colocated engines use the first ranks' slots; separate ones get their own. Raises UserError if
    the cluster is too small.
    """
    per_engine = config.rollout.engine.tensor_parallel
    engine_devices = num_engines * per_engine
    colocated = config.cluster.placement == Placement.colocated
    total = max(num_ranks, engine_devices) if colocated else num_ranks + engine_devices
    started = connect(config.cluster.ray_address, total)
    gpus = ray.cluster_resources().get("GPU", 0)
    bundle = {"CPU": 1, "GPU": 1} if gpus else {"CPU": 1}
    group = placement_group([bundle] * total, strategy="PACK")
    try:
        if not group.wait(timeout):
            have = {k: v for k, v in ray.cluster_resources().items() if k in ("CPU", "GPU")}
            raise UserError(
                f"this run needs {total} bundles of {bundle}; the Ray cluster has {have} in all and did not free them "
                f"within {timeout:.0f} s"
            )
        return _cluster(group, config, num_ranks, num_engines, bool(gpus), started)
    except BaseException:
        remove_placement_group(group)
        if started:
            ray.shutdown()
        raise


def _cluster(group: PlacementGroup, config: Config, num_ranks: int, num_engines: int, gpus: bool, started: bool) -> Cluster:
    per_engine = config.rollout.engine.tensor_parallel
    colocated = config.cluster.placement == Placement.colocated
    slots = _sorted_slots(group, group.bundle_count, gpus)
    engine_devices = num_engines * per_engine
    engine_part = slots[:engine_devices] if colocated else slots[num_ranks:]
    engines = [engine_part[i * per_engine : (i + 1) * per_engine] for i in range(num_engines)]
    for engine in engines:
        if len({slot.node for slot in engine}) > 1:
            raise UserError(
                "the tensor-parallel ranks of one engine must be on one node; change rollout.engine.tensor_parallel or "
                "the number of trainer ranks"
            )
    return Cluster(group, slots[:num_ranks], engines, gpu_share=0.45 if colocated else 1.0, _started=started)


def _sorted_slots(group: PlacementGroup, total: int, gpus: bool) -> list[Slot]:
    nodes = placement_group_table(group)["bundles_to_node_id"]
    address = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}

    def numeric(ip: str) -> tuple:
        return tuple(int(part) for part in ip.split(".")) if ip.replace(".", "").isdigit() else (ip,)

    devices: list[int | None] = [None] * total
    if gpus:
        probes = [
            _visible_device.options(
                num_gpus=1,
                num_cpus=0,
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=i),
            ).remote()
            for i in range(total)
        ]
        devices = ray.get(probes)
    slots = [Slot(i, nodes[i], devices[i]) for i in range(total)]
    return sorted(slots, key=lambda s: (numeric(address[s.node]), s.node, -1 if s.device is None else s.device, s.bundle))


@ray.remote
def _visible_device() -> int:
    return int(ray.get_gpu_ids()[0])
