"""What a weight sync moves and how long it takes, on paper: bytes over each kind of link, the lower bound, seconds.

The model: every GPU sends and receives at the same time, at the bandwidth of its own network card between nodes and of the node's fabric
within one. Every message costs a latency on top. What is waited for is the busiest GPU.
"""

from collections import Counter
from dataclasses import dataclass, field, replace
from math import ceil

from grpo_megatron.weights.sync.plan import Layouts, Link, ReshardPlan


@dataclass(frozen=True)
class Machine:
    """network, fabric: GB/s of one GPU in each direction, between nodes and within one. latency: seconds of a message."""

    network: float = 50.0  # 400 Gb/s
    fabric: float = 400.0  # NVLink of an H100, as collectives reach it
    latency: float = 30e-6


@dataclass(frozen=True)
class Cost:
    """Of one sync. network_gb, fabric_gb: all that crosses nodes, and that stays within one. sent_gb, received_gb: of the busiest
    GPU, over both. messages: of the busiest sender. bound: seconds below which no plan for these layouts can be. seconds: of
    this plan."""

    network_gb: float
    fabric_gb: float
    sent_gb: float
    received_gb: float
    messages: int
    bound: float
    seconds: float


@dataclass
class _Traffic:
    """Bytes by the GPU that sends or receives them. A GPU of the trainer is its rank, one of the engines its EngineRank."""

    network_out: Counter = field(default_factory=Counter)
    network_in: Counter = field(default_factory=Counter)
    fabric_out: Counter = field(default_factory=Counter)
    fabric_in: Counter = field(default_factory=Counter)
    messages: Counter = field(default_factory=Counter)

    def add(self, plan: ReshardPlan, link: Link, size: int, messages: int) -> None:
        layouts = plan.layouts
        if layouts.within_nodes:
            if link.carrier != link.sender:
                self.network_out[link.sender] += size
                self.network_in[link.carrier] += size
            for receiver in link.receivers:  # each reads it from the carrier's memory
                self.fabric_out[link.carrier] += size
                self.fabric_in[receiver] += size
            self.messages[link.sender] += messages
            return
        # In a broadcast receivers pass on what they get, in a chain: the sender sends once.
        copies = 1 if layouts.multicast else len(link.receivers)
        remote = not layouts.rank_nodes or any(
            layouts.node_of(receiver) != layouts.rank_nodes[link.sender] for receiver in link.receivers
        )
        out, into = (self.network_out, self.network_in) if remote else (self.fabric_out, self.fabric_in)
        out[link.sender] += size * copies
        for receiver in link.receivers:
            into[receiver] += size
        self.messages[link.sender] += messages * copies


def cost(layouts: Layouts, machine: Machine, bucket_bytes: int, itemsize: int = 2) -> Cost:
    """itemsize: bytes of an element of the engines' dtype."""
    plan, traffic = ReshardPlan(layouts), _Traffic()
    for link, size in plan.volumes(itemsize).items():
        traffic.add(plan, link, size, ceil(size / bucket_bytes))
    model_bytes = sum(
        entry.numel * (entry.engine_dtype.itemsize if entry.engine_dtype else itemsize)
        for entry in plan.entries
    )

    def busiest(network: Counter, fabric: Counter) -> float:
        return (
            max(network[gpu] / machine.network + fabric[gpu] / machine.fabric for gpu in network | fabric)
            / 1e9
        )

    def most(network: Counter, fabric: Counter) -> float:
        return max((network + fabric).values()) / 1e9

    taking = max(
        busiest(traffic.network_out, traffic.fabric_out),
        busiest(traffic.network_in, traffic.fabric_in),
    )
    messages = max(traffic.messages.values())
    return Cost(
        network_gb=sum(traffic.network_in.values()) / 1e9,
        fabric_gb=sum(traffic.fabric_in.values()) / 1e9,
        sent_gb=most(traffic.network_out, traffic.fabric_out),
        received_gb=most(traffic.network_in, traffic.fabric_in),
        messages=messages,
        bound=_bound(layouts, traffic, machine, model_bytes),
        seconds=taking + messages * machine.latency,
    )


def _bound(layouts: Layouts, traffic: _Traffic, machine: Machine, model_bytes: int) -> float:
    """What every plan needs: each engine rank receives its parameters, and each element leaves the trainer at least once.

    Within nodes: what a node's ranks do not have comes through the cards of that node, and each engine rank reads its parameters.
    """
    if not layouts.within_nodes:
        needed = max((traffic.network_in + traffic.fabric_in).values())
        return max(needed, model_bytes / layouts.sizes.world_size) / machine.network / 1e9
    cards, arriving = Counter(layouts.rank_nodes), Counter()
    for rank, size in traffic.network_in.items():
        arriving[layouts.rank_nodes[rank]] += size
    network = max((size / cards[node] for node, size in arriving.items()), default=0) / machine.network
    return max(network, max(traffic.fabric_in.values()) / machine.fabric) / 1e9


def full_tensors_seconds(layouts: Layouts, machine: Machine, itemsize: int = 2) -> float:
    """Through the object store: one rank after the other sends full tensors, once to every engine rank, over one card."""
    model_bytes = itemsize * sum(entry.numel for entry in ReshardPlan(layouts).entries)
    return model_bytes * layouts.num_engines * layouts.engine.tp / machine.network / 1e9


# Communicators that a rank can afford; NCCL keeps tens of MB of each on the device.
_MOST_GROUPS = 16


def broadcast_is_cheaper(layouts: Layouts, bucket_bytes: int, machine: Machine = Machine()) -> bool:
    """Whether broadcasts to all engines take less time than serving each by itself, as with a small model on many engines.

    Not if an engine's rank would be in too many groups, one for each link.
    """
    together = replace(layouts, multicast=True)
    groups = Counter(
        receiver for link in ReshardPlan(together).volumes(itemsize=2) for receiver in link.receivers
    )
    if max(groups.values()) > _MOST_GROUPS:
        return False
    return cost(together, machine, bucket_bytes).seconds < 0.9 * cost(layouts, machine, bucket_bytes).seconds


def on_nodes(layouts: Layouts, gpus_per_node: int, colocated: bool) -> Layouts:
    """The same with GPUs handed out node by node: the trainer's first, engines on the same ones or behind them."""
    ranks = layouts.sizes.world_size
    first = 0 if colocated else ranks
    tp = layouts.engine.tp
    return replace(
        layouts,
        multicast=colocated,
        within_nodes=colocated,
        rank_nodes=tuple(f"node{rank // gpus_per_node}" for rank in range(ranks)),
        engine_nodes=tuple(
            f"node{(first + rank) // gpus_per_node}" for rank in range(layouts.num_engines * tp)
        ),
    )
