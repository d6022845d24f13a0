"""Messages of a weight sync: the driver's commands to all processes, and their reports."""

from dataclasses import dataclass, field, replace
from enum import Enum

import torch
import torch.distributed as dist

from grpo_megatron.cluster.store import StoreAddress
from grpo_megatron.config.weight_sync import Transport
from grpo_megatron.weights.sync.delta import max_payload
from grpo_megatron.weights.sync.parcels import DIGEST_MODULUS, Parcel
from grpo_megatron.weights.sync.plan import Layouts


class SyncKind(Enum):
    """The work that a SyncCommand asks of the trainer's and the engines' ranks.

    describe: report the names, shapes and dtypes of the engine's parameters; for engine ranks only.
    transfer: copy the weights and compare digests (checksums).
    verify: compare digests only. No weights are sent.
    """

    describe = "describe"
    transfer = "transfer"
    verify = "verify"


@dataclass(frozen=True)
class SyncSetup:
    """The settings of weight syncs, which are the same for every sync of a run."""

    layouts: Layouts
    """How the trainer and the engines divide the model."""
    transport: Transport
    """What carries the parcels; not `auto`."""
    store: StoreAddress
    """Address of the driver's key-value store."""
    bucket_bytes: int
    """Maximum bytes of data in a parcel."""
    timeout: float
    """Seconds that one parcel may take."""
    dtypes: tuple[tuple[str, torch.dtype], ...] = ()
    """(engine's parameter, its dtype) of every parameter; empty until the engines have described them."""
    folder: str = ""
    """Folder in which parcels are written as files; only for Transport.disk."""
    delta: bool = False
    """Send only the elements that changed since the last sync, compressed."""

    def payload_bytes(self, parcel: Parcel, kind: SyncKind = SyncKind.transfer) -> int:
        """Return the maximum bytes that a parcel takes in a sync of this kind.

        SyncKind.verify sends only the digests of a parcel, 8 bytes each.
        """
        if kind == SyncKind.verify:
            return 8 * len(parcel.tensor_spans)
        return max_payload(parcel) if self.delta else parcel.total_bytes

    def connect(self) -> dist.TCPStore:
        return self.store.connect(self.timeout)


@dataclass(frozen=True)
class SyncCommand:
    """A command of the driver process to a trainer rank or an engine rank: its side of one weight sync."""

    kind: SyncKind
    """What to do."""
    sync_id: int
    """Number of the command within the run. It makes the sync's keys in the key-value stores unique."""
    setup: SyncSetup
    """Settings, the same in every command of a run."""
    engine: int = -1
    """Index of the engine that receives the command; -1 for trainer ranks."""
    full: bool = True
    """True if some engine may lack the weights of the last sync, so that deltas cannot be applied."""

    def to_engine(self, engine: int) -> "SyncCommand":
        return replace(self, engine=engine)


@dataclass
class SyncReport:
    """The report of a trainer rank or an engine rank after it has carried out a SyncCommand."""

    link_checksums: dict[str, int] = field(default_factory=dict)
    """{link name: checksum of all data sent, or received, over the link (the sum of its digests modulo
    2^64)}. The driver compares the checksums of both sides."""
    seconds: dict[str, float] = field(default_factory=dict)
    """{activity, such as "pack" or "all": seconds}."""
    bytes: int = 0
    """Payload bytes that the rank sent or received."""
    parameters: dict[str, tuple[tuple[int, ...], torch.dtype]] | None = None
    """{engine's parameter: (shape, dtype)}; only for SyncKind.describe."""
    wrong: tuple[str, ...] = ()
    """Names of the HF tensors that an engine rank has with another digest than the sender."""
    error: str = ""
    """Traceback if the command failed, else empty."""

    def add_digests(self, link: str, digests: list[int]) -> None:
        """Add the digests of a parcel to the checksum of its link."""
        self.link_checksums[link] = (self.link_checksums.get(link, 0) + sum(digests)) % DIGEST_MODULUS

    def add_seconds(self, activity: str, seconds: float) -> None:
        self.seconds[activity] = self.seconds.get(activity, 0.0) + seconds
