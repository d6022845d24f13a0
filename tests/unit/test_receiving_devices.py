"""Receivers of weights use the device of the parameters that they fill, and no other."""

import inspect

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing import reductions

from grpo_megatron.config.weight_sync import Transport
from grpo_megatron.weights.sync.messages import SyncSetup
from grpo_megatron.weights.sync.plan import EngineRank
from grpo_megatron.weights.sync.transports import parcel_receiver, shared_memory
from tests.unit.sync_cluster import TRANSPORTS, tp2_pp2_to_two_engines


def recorded(*arguments):
    """Stand in for rebuild_cuda_tensor in a handle."""
    return arguments


@pytest.mark.parametrize(("sender", "receiver"), [(0, 0), (0, 1), (0, 7), (3, 0), (5, 2), (1, 1)])
def test_memory_of_a_gpu_is_opened_on_the_receivers_device(sender, receiver):
    """Every scheduler of an engine with TP > 1 used to open the memory on cuda:0, because the sender's
    index was passed on.
    """
    handle = list(map(str, _parameters()))
    handle[_parameters().index("storage_device")] = sender
    opened = shared_memory._open((recorded, tuple(handle)), torch.device("cuda", receiver))
    changed = dict(zip(_parameters(), opened, strict=True))
    assert changed.pop("storage_device") == receiver
    assert all(name == value for name, value in changed.items())


def _parameters() -> list[str]:
    return list(inspect.signature(reductions.rebuild_cuda_tensor).parameters)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("device", ["cpu", "cuda:0", "cuda:3"])
def test_every_receiver_is_given_its_device(monkeypatch, tmp_path, transport, device):
    layouts, device = tp2_pp2_to_two_engines(True), torch.device(device)
    setup = SyncSetup(layouts, transport, None, bucket_bytes=700, timeout=1.0, folder=str(tmp_path))
    monkeypatch.setattr(SyncSetup, "connect", lambda self: dist.HashStore())
    receiver = parcel_receiver(setup, EngineRank(0, 1), [], device)
    assert (receiver._groups.device if transport == Transport.groups else receiver._device) == device
