"""Messages of a weight sync: the driver's commands to all processes, and their reports."""

from dataclasses import dataclass, field, replace
from enum import Enum

import torch
import torch.distributed as dist

from grpo_megatron.cluster.store import StoreAddress
from grpo_megatron.config.weight_sync import Transport
from grpo_megatron.weights.sync.delta import max_payload
from grpo_megatron.weights.sync.parcels import DIGEST_MODULUS, Parcel
from grpo_megatron.weights.sync.plan import EngineRank, Layouts, ReshardPlan


class SyncKind(Enum):
    """The work that a SyncCommand asks trainer ranks and engine ranks to do.

    describe: report the names, shapes and dtypes of the engine's parameters. Only engine ranks get this kind.
    transfer: copy the weights from trainer to engines, and compare digests (checksums).
    verify: compare digests only, without sending weights.
    """

    describe = "describe"
    transfer = "transfer"
    verify = "verify"


@dataclass(frozen=True)
class SyncSetup:
    """The settings of weight syncs, which the driver sends to all ranks with each command.

    Settings are, for example, the transport and the maximum size of a message. They stay the same from sync
    to sync, until an engine is lost, added or restarted.
    """

    layouts: Layouts
    """Description of how the trainer and the engines divide the model."""
    transport: Transport
    """The transport that carries the packed weights; never Transport.auto."""
    store: StoreAddress
    """Address of the driver's key-value store."""
    bucket_bytes: int
    """Maximum bytes of data in a parcel, which is one message of packed weights."""
    timeout: float
    """Maximum seconds that a rank waits for one message of packed weights (weight_sync.timeout)."""
    dtypes: tuple[tuple[str, torch.dtype], ...] = ()
    """(name of an engine's parameter, its dtype) for every parameter. Empty until the engines have
    reported them."""
    folder: str = ""
    """Folder in which parcels are written as files. Used only by Transport.disk."""
    delta: bool = False
    """True to send only the elements that changed since the last sync, compressed."""
    plan: int = 0
    """Number of the reshard plan, from 1. In the store, all keys of a plan have a prefix with it."""

    def payload_bytes(self, parcel: Parcel, kind: SyncKind = SyncKind.transfer) -> int:
        """Return the maximum number of bytes that are sent for a parcel in a sync of this kind.

        A parcel is one message of packed weights. In a sync of the kind SyncKind.verify, only the parcel's
        digests (checksums) are sent, 8 bytes each.
        """
        if kind == SyncKind.verify:
            return 8 * len(parcel.tensor_spans)
        return max_payload(parcel) if self.delta else parcel.total_bytes

    def connect(self) -> dist.Store:
        """Return a new client of the driver's key-value store, which sees only this reshard plan's keys."""
        return self.of_plan(self.store.connect(self.timeout))

    def of_plan(self, store: dist.Store) -> dist.Store:
        """Return a view of a key-value store that puts a prefix before every key.

        The prefix contains the number of the reshard plan, so different plans have separate keys.
        """
        return dist.PrefixStore(f"plan {self.plan}", store)


@dataclass(frozen=True)
class SyncCommand:
    """The driver's command to a trainer rank or an engine rank to carry out its side of one weight sync."""

    kind: SyncKind
    """The work to do."""
    sync_id: int
    """Id of the command, unique within the run. It is part of the sync's keys in key-value stores."""
    setup: SyncSetup
    """Settings of weight syncs, the same in every command until the reshard plan changes."""
    engine: int = -1
    """Index of the engine that receives the command; -1 for trainer ranks."""
    full: bool = True
    """True if some engine may lack the weights of the last sync, so that whole parcels must be sent
    instead of deltas."""

    def to_engine(self, engine: int) -> "SyncCommand":
        """Return a copy of the command for the engine with this index."""
        return replace(self, engine=engine)


@dataclass
class SyncReport:
    """The report of a trainer rank or an engine rank after it has carried out a SyncCommand."""

    link_checksums: dict[str, int] = field(default_factory=dict)
    """{name of a link: checksum of the weights that the rank sent over the link, or has after receiving}. A
    link is a trainer rank with the engine ranks that get the same bytes from it. Its checksum is the sum of
    the digests of its messages modulo 2^64. The driver compares the checksums of sender and receivers."""
    seconds: dict[str, float] = field(default_factory=dict)
    """{activity: seconds that it took}. An activity is "pack" or "digest", for example, or "all" for the
    whole sync."""
    bytes: int = 0
    """Number of payload bytes that the rank sent from its own weights, or received."""
    parameters: dict[str, tuple[tuple[int, ...], torch.dtype]] | None = None
    """{name of an engine's parameter: (shape, dtype)} in a report on SyncKind.describe, else None."""
    wrong: tuple[str, ...] = ()
    """Names of the HF tensors whose digest (checksum) on this engine rank differs from the sender's."""
    error: str = ""
    """Traceback if the command failed, else empty."""

    def add_digests(self, link: str, digests: list[int]) -> None:
        """Add the digests (checksums) of one message to the checksum of the message's link.

        The checksums of links are in `link_checksums`.

        link: name of the link. A link is a sender with its receivers.
        """
        self.link_checksums[link] = (self.link_checksums.get(link, 0) + sum(digests)) % DIGEST_MODULUS

    def add_seconds(self, activity: str, seconds: float) -> None:
        self.seconds[activity] = self.seconds.get(activity, 0.0) + seconds


def sync_metrics(sent: list[SyncReport], received: list[SyncReport]) -> dict[str, float]:
    """Return the metrics of a sync as {name: value}, with names such as "sent_gb" and "engine_load_seconds".

    The metrics are the GB that the trainer sent, the GB that the engines received, and the seconds of each
    activity on the slowest trainer rank or engine rank.

    sent: the reports of all trainer ranks.
    received: the reports of all engine ranks.
    """
    seconds = {
        f"{side}_{what}_seconds": max(report.seconds.get(what, 0.0) for report in reports)
        for side, reports, kinds in (
            ("trainer", sent, ("pack", "digest", "all")),
            ("engine", received, ("load", "digest", "all")),
        )
        for what in kinds
    }
    sent_gb, received_gb = (sum(report.bytes for report in reports) / 1e9 for reports in (sent, received))
    return {"sent_gb": sent_gb, "received_gb": received_gb, **seconds}


def parameter_differences(
    plan: ReshardPlan, described: dict[EngineRank, dict[str, tuple[tuple[int, ...], torch.dtype]]]
) -> list[str]:
    """Return one sentence for each engine parameter whose name, shape or dtype differs from the plan.

    If a parameter differs on several engine ranks, the sentence names only the first rank.

    described: {engine rank: {parameter: (shape, dtype)}}, as the engines have reported their parameters.
    """
    shapes, found = plan.engine_shapes, {}
    dtypes = {entry.engine: entry.engine_dtype for entry in plan.entries if entry.engine_dtype}
    for me, own in described.items():
        for name in sorted(shapes.keys() | own.keys()):
            shape, dtype = own.get(name, ("none", None))
            planned = shapes.get(name, "none")
            if shape != planned:
                found.setdefault(name, f"{me} has {name} of shape {shape} instead of {planned}")
            elif dtype != dtypes.get(name, dtype):
                found.setdefault(name, f"{me} has {name} in {dtype} instead of {dtypes[name]}")
    return list(found.values())
