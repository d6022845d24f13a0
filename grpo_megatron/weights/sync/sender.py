"""A trainer rank's side of a weight sync."""

import time
from collections import defaultdict
from collections.abc import Mapping

import torch

from grpo_megatron.weights.sync.delta import Encoder
from grpo_megatron.weights.sync.order import Answer, Order, Setup, Task
from grpo_megatron.weights.sync.parcels import Parcel, in_global_order, make_parcels, odd_factors
from grpo_megatron.weights.sync.plan import ReshardPlan
from grpo_megatron.weights.sync.relay import Relay

_MODULUS = 2**64


class Sender:
    """Keeps, from sync to sync, what its rank sends by the plan, and the channel for it."""

    def __init__(self, setup: Setup, rank: int, device: torch.device, transformer_engine: bool = False):
        """transformer_engine: the rank's parameters have the names of its layers."""
        self.setup, self._rank = setup, rank
        plan = ReshardPlan(setup.layouts, transformer_engine)
        dtypes, engine = dict(setup.dtypes), setup.layouts.engine
        links = plan.outgoing(rank) | plan.carried(rank)
        parcels = [parcel for link, parts in links.items() for parcel in make_parcels(link, parts, dtypes, setup.bucket_bytes)]
        self._parcels = in_global_order(parcels, len(plan.engine_ranks), engine.tp)
        handed_over = [parcel for parcel in self._parcels if parcel.link.carrier == rank]
        self._channel = setup.sending_channel(rank, handed_over, device)
        self._relay = Relay(setup, rank, parcels, device) if plan.has_carriers else None
        self._factors = odd_factors(parcels, device)
        self._encoder = Encoder() if setup.delta else None

    def send(self, order: Order, parameters: Mapping[str, torch.Tensor]) -> Answer:
        """parameters: of this rank by their Megatron names, whole and current."""
        seconds, seals, sent = defaultdict(float), defaultdict(int), 0
        started = time.perf_counter()
        self._channel.begin(order.number)
        if self._encoder:
            self._encoder.begin(order.full)
        for parcel in self._parcels:
            if parcel.link.sender != self._rank:
                self._channel.buffer(self.setup.size_of(parcel))
                self._channel.send(parcel, self._relay.take(parcel, order.task))
                continue
            way = self._channel if parcel.link.carrier == self._rank else self._relay
            buffer = way.buffer(self.setup.size_of(parcel))
            packing = time.perf_counter()
            parcel.pack(parameters, buffer)
            digesting = time.perf_counter()
            digests = parcel.digests(buffer, self._factors)
            parcel.sealed(buffer).copy_(digests)
            seals[parcel.link.name] += sum(digests.tolist())
            sending = time.perf_counter()
            payload = self._payload(order, parcel, buffer)
            sent += len(payload)
            way.send(parcel, payload)
            seconds["pack"] += digesting - packing
            seconds["digest"] += sending - digesting
            seconds["send"] += time.perf_counter() - sending
        if self._relay:
            self._relay.finish()
        self._channel.finish()
        seconds["all"] = time.perf_counter() - started
        return Answer({link: seal % _MODULUS for link, seal in seals.items()}, dict(seconds), sent)

    def _payload(self, order: Order, parcel: Parcel, buffer: torch.Tensor) -> torch.Tensor:
        if order.task == Task.verify:
            return buffer[parcel.data_bytes : parcel.total_bytes]
        return self._encoder.encode(parcel, buffer) if self._encoder else buffer[: parcel.total_bytes]

    def close(self) -> None:
        self._channel.close()
