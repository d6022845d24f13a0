"""The engine rank's side of a weight sync. It runs in the process that holds the engine's parameters."""

import time
from collections.abc import Mapping
from functools import partial

import torch

from grpo_megatron.weights.sync import delta
from grpo_megatron.weights.sync.messages import SyncCommand, SyncKind, SyncReport, SyncSetup
from grpo_megatron.weights.sync.parcels import Parcel, odd_factors, parcels_in_order
from grpo_megatron.weights.sync.plan import EngineRank, ReshardPlan
from grpo_megatron.weights.sync.transports import parcel_receiver


class WeightReceiver:
    """Receives the weights of one engine rank, writes them into the rank's parameters and verifies them.

    The object is reused for all syncs with the same setup, because setting up its buffers and connections
    takes long.

    setup: settings of the weight syncs.
    me: the engine rank.
    device: device of the rank's parameters.
    """

    def __init__(self, setup: SyncSetup, me: EngineRank, device: torch.device):
        self.setup = setup
        plan = ReshardPlan(setup.layouts)
        self._parcels = parcels_in_order(plan, plan.incoming(me), dict(setup.dtypes), setup.bucket_bytes)
        self._transport = parcel_receiver(setup, me, self._parcels, device)
        largest = max((parcel.total_bytes for parcel in self._parcels), default=0)
        self._factors = odd_factors(self._parcels, device)
        self._scratch = torch.empty(largest, dtype=torch.uint8, device=device)

    def receive(self, command: SyncCommand, parameters: Mapping[str, torch.Tensor]) -> SyncReport:
        """Receive all weights, write them into the parameters, and compare their digests with the senders'.

        A digest is a checksum. If the command's kind is SyncKind.verify, only digests are received, and the
        parameters stay as they are.

        parameters: {name of an engine's parameter: this rank's part of it}, written in place.

        Return the report for the driver. It names the HF tensors whose digests differ.
        """
        started, report, wrong = time.perf_counter(), SyncReport(), []
        payload_bytes = partial(self.setup.payload_bytes, kind=command.kind)
        for parcel, payload in self._transport.receive(command.sync_id, self._parcels, payload_bytes):
            report.bytes += len(payload)
            loading = time.perf_counter()
            if command.kind == SyncKind.verify:
                expected = payload.clone().view(torch.int64)
            else:
                expected = self._load(parcel, payload, parameters)
            digesting = time.perf_counter()
            parcel.pack_again(parameters, self._scratch)
            digests = parcel.digests(self._scratch, self._factors).tolist()
            pairs = zip(parcel.tensor_spans, digests, expected.tolist(), strict=True)
            wrong += [span.hf for span, found, sent in pairs if found != sent]
            report.add_digests(parcel.link.name, digests)
            report.add_seconds("load", digesting - loading)
            report.add_seconds("digest", time.perf_counter() - digesting)
        report.wrong = tuple(dict.fromkeys(wrong))
        report.add_seconds("all", time.perf_counter() - started)
        return report

    def _load(
        self, parcel: Parcel, payload: torch.Tensor, parameters: Mapping[str, torch.Tensor]
    ) -> torch.Tensor:
        """Write the weights of one message into the parameters. Return the sender's digests of the message.

        The sender has computed the digests (checksums), int64 [tensor_spans], and sent them with the weights.

        parcel: layout of the message.
        payload: the received bytes.
        """
        buffer = delta.decode(parcel, payload, parameters) if self.setup.delta else payload
        parcel.unpack(buffer, parameters)
        return parcel.sent_digests(buffer).clone()

    def close(self) -> None:
        self._transport.close()
