"""Between ranks of the trainer: parcels for engines of another node, which a rank there hands over.

On GPUs that trainer and engines share, no NCCL group can have both, so an engine gets its weights from the rank on its own device or node.
"""

import torch

from grpo_megatron.weights.sync.groups import GroupReceiver, GroupSender
from grpo_megatron.weights.sync.order import Setup, Task
from grpo_megatron.weights.sync.parcels import Parcel


class Relay(GroupSender):
    """Sends to carriers, and takes as one."""

    def __init__(self, setup: Setup, rank: int, parcels: list[Parcel], device: torch.device):
        groups = setup.groups(rank, parcels, device)
        super().__init__(groups, setup.delta)
        self._setup, self._receiver = setup, GroupReceiver(groups, setup.delta)

    def take(self, parcel: Parcel, task: Task) -> torch.Tensor:
        """The payload of a parcel that this rank carries."""
        ((_, payload),) = self._receiver.receive(0, [parcel], self._setup.expected_bytes(task))
        return payload
