"""The engine rank's side of a weight sync. It runs in the process that holds the engine's parameters."""

import time
from collections import defaultdict

import torch

from grpo_megatron.weights.sync import delta
from grpo_megatron.weights.sync.order import Answer, Order, Setup, Task
from grpo_megatron.weights.sync.parcels import DIGEST_MODULUS, Parcel, odd_factors, parcels_in_order
from grpo_megatron.weights.sync.plan import EngineRank, ReshardPlan


class Receiver:
    """Receives and verifies the weights of one engine rank.

    It is kept from sync to sync, because setting up its parcels and its channel takes long.
    """

    def __init__(self, setup: Setup, me: EngineRank, device: torch.device):
        self.setup = setup
        plan = ReshardPlan(setup.layouts)
        self._parcels = parcels_in_order(plan, plan.incoming(me), dict(setup.dtypes), setup.bucket_bytes)
        self._channel = setup.receiving_channel(me, self._parcels, device)
        largest = max((parcel.total_bytes for parcel in self._parcels), default=0)
        self._factors = odd_factors(self._parcels, device)
        self._scratch = torch.empty(largest, dtype=torch.uint8, device=device)

    def receive(self, order: Order, parameters: dict[str, torch.Tensor]) -> Answer:
        """Receive all parcels, write them into the parameters, and compare digests with the sender's.

        For Task.verify the sender sends only digests, and the parameters stay as they are.

        parameters: {engine's name: this rank's parameter}, written in place.
        Return the report for the driver. It names the HF tensors whose digests differ.
        """
        seconds, seals, wrong, received = defaultdict(float), defaultdict(int), [], 0
        verifying = order.task == Task.verify
        started = time.perf_counter()
        size_of = self.setup.expected_bytes(order.task)
        for parcel, payload in self._channel.receive(order.number, self._parcels, size_of):
            received += len(payload)
            loading = time.perf_counter()
            sealed = (
                payload.clone().view(torch.int64) if verifying else self._load(parcel, payload, parameters)
            )
            digesting = time.perf_counter()
            parcel.pack_again(parameters, self._scratch)
            digests = parcel.digests(self._scratch, self._factors).tolist()
            pairs = zip(parcel.runs, digests, sealed.tolist(), strict=True)
            wrong += [name for (name, _, _), found, expected in pairs if found != expected]
            seals[parcel.link.name] += sum(digests)
            seconds["load"] += digesting - loading
            seconds["digest"] += time.perf_counter() - digesting
        seconds["all"] = time.perf_counter() - started
        totals = {link: seal % DIGEST_MODULUS for link, seal in seals.items()}
        return Answer(totals, dict(seconds), received, wrong=tuple(dict.fromkeys(wrong)))

    def _load(
        self, parcel: Parcel, payload: torch.Tensor, parameters: dict[str, torch.Tensor]
    ) -> torch.Tensor:
        buffer = delta.decode(parcel, payload, parameters) if self.setup.delta else payload
        parcel.unpack(buffer, parameters)
        return parcel.sealed(buffer).clone()

    def close(self) -> None:
        self._channel.close()
