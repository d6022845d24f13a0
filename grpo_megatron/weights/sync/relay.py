"""Relay of parcels between trainer ranks, for engines on another node than the sender.

If trainer and engines share GPUs, an NCCL group cannot contain both. An engine then takes its weights from a
trainer rank on its own node, the relay rank (`Link.carrier`). Parcels from other nodes are first sent to the
relay rank.
"""

import torch

from grpo_megatron.weights.sync.groups import GroupReceiver, GroupSender
from grpo_megatron.weights.sync.order import Setup, Task
from grpo_megatron.weights.sync.parcels import Parcel


class Relay(GroupSender):
    """The channel between trainer ranks, over a process group of all of them.

    As a sender it sends this rank's parcels to the relay ranks on other nodes. `take` receives the parcels
    that this rank relays to engines on its own node.
    """

    def __init__(self, setup: Setup, rank: int, parcels: list[Parcel], device: torch.device):
        groups = setup.groups(rank, parcels, device)
        super().__init__(groups, setup.delta)
        self._setup, self._receiver = setup, GroupReceiver(groups, setup.delta)

    def take(self, parcel: Parcel, task: Task) -> torch.Tensor:
        """Receive the payload of a parcel that this rank relays, and return it."""
        ((_, payload),) = self._receiver.receive(0, [parcel], self._setup.expected_bytes(task))
        return payload
