"""Cost model of a weight sync: bytes over each kind of link, estimated seconds, and their lower bound.

The model assumes that all GPUs send and receive at the same time. A GPU has the bandwidth of its own network
card between nodes, and that of the fabric (NVLink) within a node. Every message adds a latency. The busiest
GPU determines the time.
"""

from collections import Counter
from dataclasses import dataclass, field, replace
from math import ceil

from grpo_megatron.weights.sync.plan import Layouts, Link, ReshardPlan


@dataclass(frozen=True)
class Machine:
    """The speed of the hardware that transfers weights.

    network: GB/s of one GPU between nodes, in each direction.
    fabric: GB/s of one GPU within a node, in each direction.
    latency: seconds per message.
    """

    network: float = 50.0  # 400 Gb/s
    fabric: float = 400.0  # NVLink of an H100, as measured in collectives
    latency: float = 30e-6


@dataclass(frozen=True)
class Cost:
    """The estimated cost of one weight sync."""

    network_gb: float
    """GB sent between nodes, in total."""
    fabric_gb: float
    """GB sent within nodes, in total."""
    sent_gb: float
    """GB sent, within and between nodes, by the GPU that sends the most."""
    received_gb: float
    """GB received, within and between nodes, by the GPU that receives the most."""
    messages: int
    """Number of messages sent by the GPU that sends the most messages."""
    bound: float
    """Lower bound of the seconds. No reshard plan for the same trainer and engines can be faster."""
    seconds: float
    """Estimated seconds of the sync."""


@dataclass
class _Traffic:
    """Bytes and messages of each GPU in one sync. The counters' keys are trainer ranks and EngineRanks."""

    network_out: Counter = field(default_factory=Counter)
    """Bytes sent to other nodes."""
    network_in: Counter = field(default_factory=Counter)
    """Bytes received from other nodes."""
    fabric_out: Counter = field(default_factory=Counter)
    """Bytes sent within the node."""
    fabric_in: Counter = field(default_factory=Counter)
    """Bytes received within the node."""
    messages: Counter = field(default_factory=Counter)
    """Messages sent."""

    def add(self, plan: ReshardPlan, link: Link, size: int, messages: int) -> None:
        layouts = plan.layouts
        if layouts.within_nodes:
            if link.relay_rank != link.sender:
                self.network_out[link.sender] += size
                self.network_in[link.relay_rank] += size
            for receiver in link.receivers:  # each receiver reads the parcel from the relay rank's memory
                self.fabric_out[link.relay_rank] += size
                self.fabric_in[receiver] += size
            self.messages[link.sender] += messages
            return
        # In a broadcast the receivers forward the data in a chain, so the sender sends it once.
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
    """Estimate the cost of one weight sync between the trainer and the engines that the layouts describe.

    machine: speed of the hardware.
    bucket_bytes: weight_sync.bucket_bytes, the maximum bytes of a message.
    itemsize: bytes of an element of the engines' dtype.
    """
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
    """Return Cost.bound, the seconds that a sync takes at least, whatever its reshard plan is.

    Each engine rank must receive its parameters, through the network if no trainer rank on its node has them.
    The trainer must send each element at least once, through the network if an engine is on other nodes than
    the trainer. With `layouts.within_nodes`, each engine rank must read its parameters over the fabric of its
    node. The parameters that the node's trainer ranks lack must also come through the node's network cards.

    traffic: bytes that each GPU sends and receives with the reshard plan.
    model_bytes: bytes of all weights in the engines' dtype.
    """
    if not layouts.within_nodes:
        through_network = max(traffic.network_in.values(), default=0) / machine.network
        within_node = max(traffic.fabric_in.values(), default=0) / machine.fabric
        speed = machine.network if _has_remote_engine(layouts) else machine.fabric
        return max(through_network, within_node, model_bytes / layouts.sizes.world_size / speed) / 1e9
    cards, arriving = Counter(layouts.rank_nodes), Counter()
    for rank, size in traffic.network_in.items():
        arriving[layouts.rank_nodes[rank]] += size
    network = max((size / cards[node] for node, size in arriving.items()), default=0) / machine.network
    return max(network, max(traffic.fabric_in.values()) / machine.fabric) / 1e9


def _has_remote_engine(layouts: Layouts) -> bool:
    """Return True if some engine is only on nodes without trainer ranks, or if no node names are known."""
    tp, nodes = layouts.engine.tp, set(layouts.rank_nodes)
    engines = (layouts.engine_nodes[index * tp : (index + 1) * tp] for index in range(layouts.num_engines))
    return not nodes or any(nodes.isdisjoint(engine) for engine in engines)


# Maximum number of communicators per rank. NCCL keeps tens of MB on the device for each.
_MOST_GROUPS = 16


def broadcast_is_cheaper(layouts: Layouts, bucket_bytes: int, machine: Machine = Machine()) -> bool:
    """Return whether a weight sync is at least 10 % faster with broadcasts than with a copy for each engine.

    Broadcasts pay off for a small model with many engines, for example. They need one process group for each
    set of a sender and its receivers. The result is False if an engine rank would be in too many groups.

    layouts: trainer and engines, with separate copies for the engines (`multicast` is False).
    bucket_bytes: weight_sync.bucket_bytes, the maximum bytes of a message.
    """
    together = replace(layouts, multicast=True)
    groups = Counter(
        receiver for link in ReshardPlan(together).volumes(itemsize=2) for receiver in link.receivers
    )
    if max(groups.values()) > _MOST_GROUPS:
        return False
    return cost(together, machine, bucket_bytes).seconds < 0.9 * cost(layouts, machine, bucket_bytes).seconds


def on_nodes(layouts: Layouts, gpus_per_node: int, colocated: bool) -> Layouts:
    """Return a copy of the layouts in which every rank has a node, to estimate costs on an imagined cluster.

    Nodes are filled one after the other, first with the trainer's ranks and then with the engines' ranks.

    colocated: True if the engines use the same GPUs as the trainer, and get weights through shared memory.
        False: the engines are on further GPUs, and each of them is sent a separate copy.
    """
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
