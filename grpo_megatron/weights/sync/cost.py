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
    """The estimated cost of one weight sync: GB and messages that the GPUs send, and seconds."""

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
    """Bytes that each GPU sends and receives in one weight sync, and messages that it sends.

    Each field is a Counter. Its keys are the GPUs: trainer ranks (int), and engine ranks (EngineRank).
    """

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
    """Return a lower bound of the seconds of a weight sync, however well the senders share the work.

    Without `layouts.within_nodes`, the bound is the largest of these three:

    - Seconds in which the busiest engine rank receives its bytes from other nodes.
    - Seconds in which the busiest engine rank receives its bytes from its own node.
    - Seconds in which all trainer ranks together send each weight once. They send through the network if some
      engine has no trainer rank on its nodes, else within nodes.

    With `layouts.within_nodes`, the bound is the larger of these two:

    - Seconds in which all network cards of a node together receive the bytes that come from other nodes.
    - Seconds in which the busiest engine rank reads its parameters within its node.

    traffic: bytes that each GPU sends and receives in the planned sync.
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
    """Return True if some engine is only on nodes without trainer ranks, or if node names are not known."""
    tp, nodes = layouts.engine.tp, set(layouts.rank_nodes)
    engines = (layouts.engine_nodes[index * tp : (index + 1) * tp] for index in range(layouts.num_engines))
    return not nodes or any(nodes.isdisjoint(engine) for engine in engines)


# Maximum number of communicators per rank. NCCL keeps tens of MB on the device for each.
_MOST_GROUPS = 16


def broadcast_is_cheaper(layouts: Layouts, bucket_bytes: int, machine: Machine = Machine()) -> bool:
    """Return True if broadcasts make a weight sync over 10 % faster than a separate copy for each engine.

    The times are estimates of `cost`. Broadcasts pay off for a small model with many engines, for example.
    Each sender needs a process group for each set of receivers. The result is False if an engine rank would
    be in more than 16 groups, because each group takes memory on the device.

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

    The trainer's ranks fill the nodes one after the other. The engines' ranks continue on the next free GPU,
    or begin again at the first node if they share the trainer's GPUs.

    colocated: True if the engines use the same GPUs as the trainer, and get weights through shared memory.
        False: the engines are on further GPUs, and each engine is sent a separate copy.
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
