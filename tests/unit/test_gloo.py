"""Process groups that share a gloo device."""

import datetime
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
import torch
from torch.distributed import HashStore, ProcessGroupGloo

from grpo_megatron.cluster import gloo
from tests.sockets import listening

TIMEOUT = datetime.timedelta(seconds=60)


@pytest.fixture(autouse=True)
def sharing(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setattr(ProcessGroupGloo, "__init__", ProcessGroupGloo.__init__)  # is put back afterwards
    gloo._devices.cache_clear()
    gloo.share_device()
    gloo.share_device()


def waiting_threads() -> int:
    return sum(path.read_text() == "gloo_tcp_loop\n" for path in Path("/proc/self/task").glob("*/comm"))


def groups(count: int) -> list[list[ProcessGroupGloo]]:
    """Return groups of two ranks, which are both in this process."""

    def rank(rank: int) -> list[ProcessGroupGloo]:
        return [ProcessGroupGloo(store, rank, 2, timeout=TIMEOUT) for store in stores]

    stores = [HashStore() for _ in range(count)]
    with ThreadPoolExecutor(2) as pool:
        return list(zip(*pool.map(rank, range(2)), strict=True))


def sums(ranks: list[ProcessGroupGloo], values: list[float]) -> list[float]:
    """Return each rank's result of an all_reduce to which rank i contributes values[i]."""
    tensors = [torch.tensor([value]) for value in values]
    for work in [group.allreduce([tensor]) for group, tensor in zip(ranks, tensors, strict=True)]:
        work.wait()
    return [tensor.item() for tensor in tensors]


def test_groups_have_one_thread_that_waits_for_sockets():
    before = waiting_threads()
    made = groups(4)
    assert waiting_threads() == before + 1
    for number, ranks in enumerate(made):
        assert sums(ranks, [1.0 + number, 10.0]) == [11.0 + number] * 2


def test_a_group_that_is_gone_leaves_the_others_working():
    first, second = groups(2)
    del first
    assert sums(second, [1.0, 2.0]) == [3.0, 3.0]


def test_a_device_listens_on_the_interface_that_is_named():
    own = psutil.Process()
    before = listening(own).keys()
    made = groups(1)
    assert {address for _, address, _ in listening(own).keys() - before} == {"127.0.0.1"}
    del made


def test_an_interface_that_is_not_there(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nowhere0")
    with pytest.raises(RuntimeError, match="nowhere0"):
        groups(1)
