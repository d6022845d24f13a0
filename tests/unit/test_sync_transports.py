"""Requests of weight sync's transports to others while parcels travel, and what they leave behind."""

import os
import threading
from collections import Counter
from contextlib import closing
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from grpo_megatron.config.weight_sync import Transport
from grpo_megatron.weights.sync.messages import SyncCommand, SyncKind, SyncSetup
from grpo_megatron.weights.sync.parcels import make_parcels
from grpo_megatron.weights.sync.plan import ReshardPlan
from grpo_megatron.weights.sync.transports.base import parcel_key
from grpo_megatron.weights.sync.transports.disk import DiskReceiver
from grpo_megatron.weights.sync.transports.groups import _IN_FLIGHT, _Ring
from tests.unit.sync_cluster import DENSE, Cluster, hf_tensors, tp2_pp2_to_two_engines


class CountedStore:
    """The driver's store, as a rank reaches it. `asked` counts the operations of all ranks.

    It leaves out `check`: a process that has waited 2 s looks whether the driver has ended the sync, and on
    a busy machine some do.
    """

    def __init__(self, store, asked):
        self._store, self._asked = store, asked

    def __getattr__(self, name):
        if name != "check":
            self._asked[name] += 1
        return getattr(self._store, name)


def test_parcels_within_a_node_do_not_pass_through_the_drivers_store(monkeypatch):
    """Otherwise it would be asked eight times for each of some 10,000 parcels of a large model, in one
    thread.
    """
    asked, connect = Counter(), SyncSetup.connect
    monkeypatch.setattr(SyncSetup, "connect", lambda setup: CountedStore(connect(setup), asked))
    tensors = hf_tensors(DENSE)
    with closing(Cluster(tp2_pp2_to_two_engines(True), Transport.shared_memory)) as one:
        one.sync(tensors)
        meetings = sum(
            len({link.relay_rank for link in one.plan.incoming(me)}) for me in one.plan.engine_ranks
        )
        assert asked == {"set": len(one.senders), "wait": meetings, "get": meetings}
        asked.clear()
        one.sync(tensors)
        one.check(tensors)
        assert not asked


def test_shared_memory_has_no_name_that_a_killed_process_could_leave():
    with closing(Cluster(tp2_pp2_to_two_engines(True), Transport.shared_memory)) as one:
        one.sync(hf_tensors(DENSE))
        mapped = Path("/proc/self/maps").read_text()
        assert "grpo-weights" in mapped
        assert "/dev/shm/grpo" not in mapped


def test_disk_keeps_the_files_of_one_sync_alone(tmp_path):
    with closing(Cluster(tp2_pp2_to_two_engines(True), Transport.disk, folder=tmp_path)) as one:
        keys = []
        for _ in range(3):
            one.sync(hf_tensors(DENSE))
            keys.append(one.server.store.num_keys())
        assert os.listdir(tmp_path) == ["sync00000003"]
        assert keys == keys[:1] * 3
    assert os.listdir(tmp_path) == []


def test_a_file_is_looked_for_once_it_is_announced_and_may_then_be_late(tmp_path):
    """NFS caches its answer that a file does not exist."""
    store, parcel = dist.HashStore(), first_parcel()
    path = tmp_path / "sync00000007" / f"{parcel.link.name}.{parcel.index}"
    path.parent.mkdir()

    def receive(timeout):
        receiver = DiskReceiver(store, str(tmp_path), torch.device("cpu"), timeout)
        return next(receiver.receive(7, [parcel], lambda _: 3))[1].tolist()

    path.write_bytes(b"old")
    with pytest.raises(TimeoutError, match=r"no process reported .*/written within 0 s"):
        receive(timeout=0.2)
    path.unlink()
    store.set(parcel_key(7, parcel, "written"), "")
    with pytest.raises(TimeoutError, match=f"{path} did not appear on this node within 0 s"):
        receive(timeout=0.2)
    complete = tmp_path / "complete"
    complete.write_bytes(b"new")  # renamed, as the sender does: no receiver sees a partial file
    threading.Timer(0.3, complete.rename, [path]).start()
    assert receive(timeout=20) == list(b"new")


def first_parcel():
    plan = ReshardPlan(tp2_pp2_to_two_engines())
    link, parts = next(iter(plan.outgoing(0).items()))
    return make_parcels(link, parts, dict.fromkeys(plan.engine_shapes, torch.float32), max_bytes=700)[0]


def test_a_buffer_is_kept_while_later_messages_are_in_flight():
    ring = _Ring(torch.device("cpu"))
    buffers = [ring.take(8).fill_(number) for number in range(_IN_FLIGHT + 1)]
    assert [int(buffer[0]) for buffer in buffers] == list(range(_IN_FLIGHT + 1))
    ring.take(4).fill_(99)
    assert [int(buffer[0]) for buffer in buffers] == [99, *range(1, _IN_FLIGHT + 1)]


def test_only_the_engine_differs_in_an_engines_command():
    setup = object()
    command = SyncCommand(SyncKind.transfer, 7, setup, full=False)
    assert command.to_engine(3) == SyncCommand(SyncKind.transfer, 7, setup, engine=3, full=False)
