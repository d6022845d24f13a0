"""Transports of parcels, which are the packed weights, from trainer ranks to engine ranks."""

import torch

from grpo_megatron.config.weight_sync import Transport
from grpo_megatron.weights.sync.messages import SyncSetup
from grpo_megatron.weights.sync.parcels import Parcel
from grpo_megatron.weights.sync.plan import EngineRank
from grpo_megatron.weights.sync.transports.base import ParcelReceiver, ParcelSender
from grpo_megatron.weights.sync.transports.disk import DiskReceiver, DiskSender
from grpo_megatron.weights.sync.transports.groups import GroupReceiver, Groups, GroupSender
from grpo_megatron.weights.sync.transports.shared_memory import SharedMemoryReceiver, SharedMemorySender


def parcel_sender(setup: SyncSetup, rank: int, parcels: list[Parcel], device: torch.device) -> ParcelSender:
    """Return the sending side of the configured transport for a trainer rank.

    With Transport.groups, this creates the process groups, in which all ranks must take part.

    setup: settings of weight syncs, which include the transport.
    rank: the trainer rank.
    parcels: the messages of packed weights that the rank sends to engine ranks.
    device: device of the buffers in which the weights are packed.
    """
    if setup.transport == Transport.disk:
        return DiskSender(setup.connect(), setup.folder, device)
    if setup.transport == Transport.groups:
        return GroupSender(Groups(setup, rank, parcels, device), setup.delta)
    # At least 1, because shared memory cannot be empty.
    largest = max(map(setup.payload_bytes, parcels), default=1)
    return SharedMemorySender(setup.connect(), rank, largest, device, setup.timeout)


def parcel_receiver(
    setup: SyncSetup, me: EngineRank, parcels: list[Parcel], device: torch.device
) -> ParcelReceiver:
    """Return the receiving side of the configured transport for an engine rank.

    With Transport.groups, this creates the process groups, in which all ranks must take part.

    setup: settings of weight syncs, which include the transport.
    me: the engine rank.
    parcels: the messages of packed weights that the engine rank receives.
    device: device of the engine's parameters.
    """
    if setup.transport == Transport.disk:
        return DiskReceiver(setup.connect(), setup.folder, device, setup.timeout)
    if setup.transport == Transport.groups:
        return GroupReceiver(Groups(setup, me, parcels, device), setup.delta)
    return SharedMemoryReceiver(setup.connect(), device, setup.timeout)
