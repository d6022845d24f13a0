"""Receivers of weights use the device of the parameters that they fill, and no other."""

import inspect

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing import reductions

from grpo_megatron.weights.sync import shared_memory
from grpo_megatron.weights.sync.order import Setup, Way
from grpo_megatron.weights.sync.plan import EngineRank
from tests.unit.sync_cluster import tp2_pp2_to_two_engines


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


@pytest.mark.parametrize("way", Way)
@pytest.mark.parametrize("device", ["cpu", "cuda:0", "cuda:3"])
def test_every_receiver_is_given_its_device(monkeypatch, tmp_path, way, device):
    layouts, device = tp2_pp2_to_two_engines(True), torch.device(device)
    setup = Setup(layouts, way, None, bucket_bytes=700, timeout=1.0, folder=str(tmp_path))
    monkeypatch.setattr(Setup, "connect", lambda self: dist.HashStore())
    channel = setup.receiving_channel(EngineRank(0, 1), [], device)
    assert (channel._groups.device if way == Way.groups else channel._device) == device
