"""The trainer rank's side of a weight sync."""

import time
from collections.abc import Callable, Mapping

import torch

from grpo_megatron.weights.sync.delta import Encoder
from grpo_megatron.weights.sync.messages import SyncCommand, SyncKind, SyncReport, SyncSetup
from grpo_megatron.weights.sync.parcels import Parcel, odd_factors, parcels_in_order
from grpo_megatron.weights.sync.plan import ReshardPlan
from grpo_megatron.weights.sync.quantised_shards import QuantisedShards
from grpo_megatron.weights.sync.transports import parcel_sender
from grpo_megatron.weights.sync.transports.groups import Relay


class WeightSender:
    """Sends the weights of one trainer rank to the engine ranks that need them.

    It also relays the messages of trainer ranks on other nodes to engine ranks on this node. The object is
    reused for all syncs with the same setup, because setting up its buffers and connections takes long.
    """

    def __init__(self, setup: SyncSetup, rank: int, device: torch.device, transformer_engine: bool = False):
        """Compute the messages that a trainer rank sends or relays, and open its connections.

        setup: settings of the weight syncs.
        rank: the trainer rank.
        device: device of the buffers in which weights are packed.
        transformer_engine: True if the rank's parameters have the names of TransformerEngine's layers.
        """
        self.setup, self._rank = setup, rank
        plan = ReshardPlan(setup.layouts, transformer_engine)
        self._quantised = plan.quantised(rank)
        links = plan.outgoing(rank) | plan.relayed(rank)
        self._parcels = parcels_in_order(plan, links, dict(setup.dtypes), setup.bucket_bytes)
        to_engines = [parcel for parcel in self._parcels if parcel.link.relay_rank == rank]
        self._transport = parcel_sender(setup, rank, to_engines, device)
        self._relay = Relay(setup, rank, self._parcels, device) if plan.has_relays else None
        self._factors = odd_factors(self._parcels, device)
        self._encoder = Encoder() if setup.delta else None

    def send(
        self,
        command: SyncCommand,
        parameters: Mapping[str, torch.Tensor],
        advance: Callable[[], None] = lambda: None,
    ) -> SyncReport:
        """Send this rank's weights, and relay weights of ranks on other nodes to engines on this node.

        If the command's kind is SyncKind.verify, only the digests (checksums) of the weights are sent. With
        weight_sync.delta, only changed weights are sent, unless `command.full` is set.

        parameters: {Megatron name: this rank's current shard} of the weights to send (Layouts.content).
        advance: called before each message, to report progress to the hang detector.

        Return the report for the driver.
        """
        started, report = time.perf_counter(), SyncReport()
        if self._quantised:
            parameters = QuantisedShards(parameters, self._quantised)
        self._transport.begin(command.sync_id)
        if self._encoder:
            self._encoder.begin(command.full)
        for parcel in self._parcels:
            advance()
            if parcel.link.sender == self._rank:
                self._send_own(parcel, parameters, command.kind, report)
            else:
                self._transport.buffer(self.setup.payload_bytes(parcel))
                self._transport.send(parcel, self._relay.take(parcel, command.kind))
        if self._relay:
            self._relay.finish()
        self._transport.finish()
        report.add_seconds("all", time.perf_counter() - started)
        return report

    def _send_own(
        self, parcel: Parcel, parameters: Mapping[str, torch.Tensor], kind: SyncKind, report: SyncReport
    ) -> None:
        """Pack one message of this rank's weights, and send it to engine ranks or to a relay rank.

        A relay rank is a trainer rank on the receiving engine ranks' node. It passes the message on to those
        engine ranks. The message's digests (checksums), bytes and seconds are added to `report`.

        parcel: layout of the message.
        kind: kind of the weight sync. For SyncKind.verify, only the digests are sent.
        """
        sender = self._transport if parcel.link.relay_rank == self._rank else self._relay
        buffer = sender.buffer(self.setup.payload_bytes(parcel))
        packing = time.perf_counter()
        parcel.pack(parameters, buffer)
        digesting = time.perf_counter()
        digests = parcel.digests(buffer, self._factors)
        parcel.sent_digests(buffer).copy_(digests)
        report.add_digests(parcel.link.name, digests.tolist())
        sending = time.perf_counter()
        payload = self._payload(parcel, buffer, kind)
        sender.send(parcel, payload)
        report.bytes += len(payload)
        report.add_seconds("pack", digesting - packing)
        report.add_seconds("digest", sending - digesting)
        report.add_seconds("send", time.perf_counter() - sending)

    def _payload(self, parcel: Parcel, buffer: torch.Tensor, kind: SyncKind) -> torch.Tensor:
        if kind == SyncKind.verify:
            return buffer[parcel.data_bytes : parcel.total_bytes]
        return self._encoder.encode(parcel, buffer) if self._encoder else buffer[: parcel.total_bytes]

    def close(self) -> None:
        self._transport.close()
        if self._relay:
            self._relay.close()


def sender_for(
    setup: SyncSetup,
    last: WeightSender | None,
    rank: int,
    device: torch.device,
    transformer_engine: bool,
) -> WeightSender:
    """Return the WeightSender for a sync: `last` if it was made for an equal setup, else a new WeightSender.

    setup: settings of the sync.
    last: the sender of the last sync, which is closed if it cannot be used again; None before the first sync.
    rank, device, transformer_engine: arguments of a new WeightSender.
    """
    if last is not None and last.setup == setup:
        return last
    if last is not None:
        last.close()
    return WeightSender(setup, rank, device, transformer_engine)
