"""Messages of a weight sync: the driver's orders to all processes, and their answers."""

from dataclasses import dataclass, replace
from enum import Enum

import torch
import torch.distributed as dist

from grpo_megatron.cluster.store import StoreAddress
from grpo_megatron.weights.sync.channel import ReceivingChannel, SendingChannel, SizeOf
from grpo_megatron.weights.sync.delta import max_payload
from grpo_megatron.weights.sync.disk import DiskReceiver, DiskSender
from grpo_megatron.weights.sync.groups import GroupReceiver, Groups, GroupSender
from grpo_megatron.weights.sync.parcels import Parcel
from grpo_megatron.weights.sync.plan import EngineRank, Layouts
from grpo_megatron.weights.sync.shared_memory import SharedMemoryReceiver, SharedMemorySender


class Way(Enum):
    """The transport that carries parcels: one of the values of weight_sync.transport that use a plan."""

    shared_memory = "shared_memory"
    groups = "groups"
    disk = "disk"


class Task(Enum):
    """The task that an Order gives to the trainer's and the engines' ranks.

    describe: report the names, shapes and dtypes of the engine's parameters; for engine ranks only.
    transfer: copy the weights and compare digests (checksums).
    verify: compare digests only. No weights are sent.
    """

    describe = "describe"
    transfer = "transfer"
    verify = "verify"


@dataclass(frozen=True)
class Setup:
    """The settings of weight syncs, which are the same for every sync of a run."""

    layouts: Layouts
    """How the trainer and the engines divide the model."""
    way: Way
    """The transport that carries parcels."""
    store: StoreAddress
    """Address of the driver's key-value store."""
    bucket_bytes: int
    """Maximum bytes of data in a parcel."""
    timeout: float
    """Seconds that one parcel may take."""
    dtypes: tuple[tuple[str, torch.dtype], ...] = ()
    """(engine's parameter, its dtype) of every parameter; empty until the engines have described them."""
    folder: str = ""
    """Folder in which parcels are written as files; only for Way.disk."""
    delta: bool = False
    """Send only the elements that changed since the last sync, compressed."""

    def size_of(self, parcel: Parcel) -> int:
        """Return the maximum payload bytes of a parcel in a transfer."""
        return max_payload(parcel) if self.delta else parcel.total_bytes

    def expected_bytes(self, task: Task) -> SizeOf:
        """Return a function that gives the payload bytes of a parcel; for deltas, their maximum.

        Task.verify sends only the digests of a parcel, 8 bytes each.
        """
        return (lambda parcel: 8 * len(parcel.runs)) if task == Task.verify else self.size_of

    def connect(self) -> dist.TCPStore:
        return self.store.connect(self.timeout)

    def sending_channel(self, rank: int, parcels: list[Parcel], device: torch.device) -> SendingChannel:
        """Return the channel over which this trainer rank sends these parcels to engine ranks."""
        if self.way == Way.disk:
            return DiskSender(self.connect(), self.folder, device)
        if self.way == Way.groups:
            return GroupSender(self.groups(rank, parcels, device), self.delta)
        # At least 1, because shared memory cannot be empty.
        largest = max((self.size_of(parcel) for parcel in parcels), default=1)
        return SharedMemorySender(self.connect(), rank, largest, device, self.timeout)

    def receiving_channel(
        self, me: EngineRank, parcels: list[Parcel], device: torch.device
    ) -> ReceivingChannel:
        if self.way == Way.disk:
            return DiskReceiver(self.connect(), self.folder, device, self.timeout)
        if self.way == Way.groups:
            return GroupReceiver(self.groups(me, parcels, device), self.delta)
        return SharedMemoryReceiver(self.connect(), device, self.timeout)

    def groups(self, me: int | EngineRank, parcels: list[Parcel], device: torch.device) -> Groups:
        links = list(dict.fromkeys(parcel.link for parcel in parcels))
        return Groups(self.connect(), self.layouts, me, links, device, self.timeout)


@dataclass(frozen=True)
class Order:
    """A command of the driver process to a trainer rank or an engine rank: its side of one weight sync."""

    task: Task
    """The task to carry out."""
    number: int
    """Sequence number of the order. It makes the order's keys in the key-value stores unique."""
    setup: Setup
    """Settings, the same in every order of a run."""
    engine: int = -1
    """Index of the engine that receives the order; -1 for trainer ranks."""
    full: bool = True
    """True if some engine may lack the weights of the last sync, so that deltas cannot be applied."""

    def to_engine(self, engine: int) -> "Order":
        return replace(self, engine=engine)


@dataclass
class Answer:
    """The report of a trainer rank or an engine rank after it has carried out an order."""

    seals: dict[str, int]
    """{link name: checksum of all data sent, or received, over the link (the sum of its digests modulo
    2^64)}. The driver compares the checksums of both sides."""
    seconds: dict[str, float]
    """{activity, such as "pack" or "all": seconds}."""
    bytes: int = 0
    """Payload bytes that the rank sent or received."""
    parameters: dict[str, tuple[tuple[int, ...], torch.dtype]] | None = None
    """{engine's parameter: (shape, dtype)}; only for Task.describe."""
    wrong: tuple[str, ...] = ()
    """Names of the HF tensors that an engine rank has with another digest than the sender."""
    error: str = ""
    """Traceback if the order failed, else empty."""
