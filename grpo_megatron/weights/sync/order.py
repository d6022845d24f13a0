"""What the driver tells every process of a weight sync; small, the same for all of them."""

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
    """How parcels travel."""

    shared_memory = "shared_memory"
    groups = "groups"
    disk = "disk"


class Task(Enum):
    """describe: say what parameters there are. transfer: bring the weights over. verify: only compare digests, nothing is sent."""

    describe = "describe"
    transfer = "transfer"
    verify = "verify"


@dataclass(frozen=True)
class Setup:
    """What stays the same from sync to sync.

    store: of the driver. dtypes: {engine's parameter: its dtype}. folder: for Way.disk. timeout: seconds that
    one parcel may take.
    """

    layouts: Layouts
    way: Way
    store: StoreAddress
    bucket_bytes: int
    timeout: float
    dtypes: tuple[tuple[str, torch.dtype], ...] = ()
    folder: str = ""
    delta: bool = False

    def size_of(self, parcel: Parcel) -> int:
        """Bytes of the largest payload of a parcel."""
        return max_payload(parcel) if self.delta else parcel.total_bytes

    def expected_bytes(self, task: Task) -> SizeOf:
        """Of the payload of a parcel; the largest if it varies."""
        return (lambda parcel: 8 * len(parcel.runs)) if task == Task.verify else self.size_of

    def connect(self) -> dist.TCPStore:
        return self.store.connect(self.timeout)

    def sending_channel(self, rank: int, parcels: list[Parcel], device: torch.device) -> SendingChannel:
        """For the parcels that this rank of the trainer hands over."""
        if self.way == Way.disk:
            return DiskSender(self.connect(), self.folder, device)
        if self.way == Way.groups:
            return GroupSender(self.groups(rank, parcels, device), self.delta)
        largest = max(
            (self.size_of(parcel) for parcel in parcels), default=1
        )  # there is no memory of no bytes
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
    """One call to a rank of the trainer, or of an engine.

    number: of the call, by which syncs and answers are told apart. engine: whose rank gets it. full: what was sent
    last is not in all engines, so a delta would not do.
    """

    task: Task
    number: int
    setup: Setup
    engine: int = -1
    full: bool = True

    def to_engine(self, engine: int) -> "Order":
        return replace(self, engine=engine)


@dataclass
class Answer:
    """What a rank did. seals: {link: sum of the digests of all its parcels} of what it sent, or found in its own parameters.

    parameters: {name: (shape, dtype)} for Task.describe. wrong: HF tensors whose digest differs. error: what failed, else empty.
    """

    seals: dict[str, int]
    seconds: dict[str, float]
    bytes: int = 0
    parameters: dict[str, tuple[tuple[int, ...], torch.dtype]] | None = None
    wrong: tuple[str, ...] = ()
    error: str = ""
