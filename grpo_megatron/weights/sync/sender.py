"""The trainer rank's side of a weight sync."""

import time
from collections import defaultdict
from collections.abc import Callable, Mapping

import torch

from grpo_megatron.weights.sync.delta import Encoder
from grpo_megatron.weights.sync.order import Answer, Order, Setup, Task
from grpo_megatron.weights.sync.parcels import DIGEST_MODULUS, Parcel, odd_factors, parcels_in_order
from grpo_megatron.weights.sync.plan import ReshardPlan
from grpo_megatron.weights.sync.quantised import Quantised
from grpo_megatron.weights.sync.relay import Relay


class Sender:
    """Sends the weights of one trainer rank to the engine ranks that need them.

    It is kept from sync to sync, because setting up its parcels and its channel takes long.
    """

    def __init__(self, setup: Setup, rank: int, device: torch.device, transformer_engine: bool = False):
        """Compute the rank's parcels and open its channels.

        transformer_engine: the rank's parameters have the names of TransformerEngine's layers.
        """
        self.setup, self._rank = setup, rank
        plan = ReshardPlan(setup.layouts, transformer_engine)
        self._quantised = plan.quantised(rank)
        links = plan.outgoing(rank) | plan.carried(rank)
        self._parcels = parcels_in_order(plan, links, dict(setup.dtypes), setup.bucket_bytes)
        handed_over = [parcel for parcel in self._parcels if parcel.link.carrier == rank]
        self._channel = setup.sending_channel(rank, handed_over, device)
        self._relay = Relay(setup, rank, self._parcels, device) if plan.has_carriers else None
        self._factors = odd_factors(self._parcels, device)
        self._encoder = Encoder() if setup.delta else None

    def send(
        self, order: Order, parameters: Mapping[str, torch.Tensor], advance: Callable[[], None] = lambda: None
    ) -> Answer:
        """Send this rank's weights, and relay the parcels of ranks on other nodes to engines on this node.

        For Task.verify, send only the digests of the weights.

        parameters: {Megatron name: this rank's current shard, with LoRA adapters merged}.
        advance: called before each parcel, to report progress to the hang detector.
        Return the report for the driver.
        """
        seconds, seals, sent = defaultdict(float), defaultdict(int), 0
        started = time.perf_counter()
        parameters = Quantised(parameters, self._quantised) if self._quantised else parameters
        self._channel.begin(order.number)
        if self._encoder:
            self._encoder.begin(order.full)
        for parcel in self._parcels:
            advance()
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
        return Answer({link: seal % DIGEST_MODULUS for link, seal in seals.items()}, dict(seconds), sent)

    def _payload(self, order: Order, parcel: Parcel, buffer: torch.Tensor) -> torch.Tensor:
        if order.task == Task.verify:
            return buffer[parcel.data_bytes : parcel.total_bytes]
        return self._encoder.encode(parcel, buffer) if self._encoder else buffer[: parcel.total_bytes]

    def close(self) -> None:
        self._channel.close()


def sender_for(
    setup: Setup, last: Sender | None, rank: int, device: torch.device, transformer_engine: bool
) -> Sender:
    """Return the sender to use for a sync: the last one if it has this setup, else a new one.

    last: the sender of the last sync, which is closed if it cannot be used again; None at the first sync.
    """
    if last is not None and last.setup == setup:
        return last
    if last is not None:
        last.close()
    return Sender(setup, rank, device, transformer_engine)
