"""Functions that the tests of this folder run in a process with the fake devices."""

import dataclasses
import pickle
import sys
import threading
import types
from collections.abc import Callable
from contextlib import closing

import pytest
import torch

from grpo_megatron.config.weight_sync import Transport
from grpo_megatron.megatron.memory.parking import Parking
from grpo_megatron.megatron.memory.training import unique_storages
from grpo_megatron.model.entries import EngineLayout
from grpo_megatron.model.parallel_sizes import ParallelSizes
from grpo_megatron.sglang import weight_receiver
from grpo_megatron.weights.sync import delta, receiver, sender
from grpo_megatron.weights.sync.messages import SyncCommand, SyncKind, SyncReport
from grpo_megatron.weights.sync.plan import EngineRank, Layouts
from grpo_megatron.weights.sync.transports import shared_memory
from tests.unit.sync_cluster import DENSE, Cluster, hf_tensors


class Node(Cluster):
    """A cluster on one node with two devices.

    Trainer rank r, and rank r of each engine, are on device r % 2.
    """

    def __init__(self, *args, **settings):
        super().__init__(*args, **settings)
        self.arrived = self._on_devices(self.arrived)

    def device_of(self, rank: int | EngineRank) -> torch.device:
        return torch.device("fake", (rank.rank if isinstance(rank, EngineRank) else rank) % 2)

    def trainer_parameters(self, tensors):
        return self._on_devices(super().trainer_parameters(tensors))

    def _on_devices(self, parameters):
        """Move each rank's tensors to its device: {rank: {name: tensor}}."""
        return {
            rank: {name: own.to(self.device_of(rank)) for name, own in named.items()}
            for rank, named in parameters.items()
        }


def colocated(engines: int = 1, **sizes) -> Layouts:
    """Return the layouts of a node with two devices that trainer ranks and TP2 engines share."""
    sizes = dataclasses.replace(ParallelSizes(tp=2), **sizes)
    return Layouts(DENSE, sizes, EngineLayout(2), engines, multicast=True, within_nodes=True)


def sync(
    transport: Transport,
    folder: str,
    use_delta: bool = False,
    layouts: Layouts | None = None,
    timeout: float = 10.0,
) -> None:
    """Transfer weights twice and verify them.

    Every parameter must arrive on its rank's device with the right digest.

    timeout: seconds in which a rank waits for another one.
    """
    with closing(Node(layouts or colocated(), transport, folder, timeout=timeout, delta=use_delta)) as node:
        for seed in (1, 2):
            tensors = hf_tensors(DENSE, seed)
            reports = node.sync(tensors, full=seed == 1)
            node.check(tensors)
            assert not any(reports[me].wrong for me in node.plan.engine_ranks)
        node.sync(tensors, SyncKind.verify)
        for me, own in node.arrived.items():
            assert {value.device for value in own.values()} == {node.device_of(me)}


def over_shared_memory(tmp_path: str) -> None:
    sync(Transport.shared_memory, tmp_path)


def as_deltas(tmp_path: str) -> None:
    sync(Transport.shared_memory, tmp_path, use_delta=True)


def over_files(tmp_path: str) -> None:
    sync(Transport.disk, tmp_path, use_delta=True)


def to_two_engines(tmp_path: str) -> None:
    """Sync to two engines, whose receivers open each rank's memory on both devices."""
    sync(Transport.shared_memory, tmp_path, layouts=colocated(engines=2, tp=1, pp=2))


class Model(torch.nn.Module):
    """A model with an engine rank's parameters under the engine's names."""

    def __init__(self, own: dict[str, torch.Tensor]):
        super().__init__()
        self._own = {name: torch.nn.Parameter(value, requires_grad=False) for name, value in own.items()}

    def named_parameters(self, *_args, **_kwargs):
        return iter(self._own.items())

    def parameters(self, recurse=True):
        return iter(self._own.values())


def through_sglangs_weight_loader(tmp_path: str) -> None:
    """Sync through SGLang's loader. The schedulers see both devices, and each trainer rank only its own."""
    local = threading.local()
    distributed = types.SimpleNamespace(get_tp_group=lambda: types.SimpleNamespace(rank_in_group=local.rank))
    with (
        closing(Node(colocated(), Transport.shared_memory, tmp_path)) as node,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setitem(sys.modules, "sglang.srt.distributed", distributed)
        tensors, sync_id = hf_tensors(DENSE), 1
        have = node.trainer_parameters(tensors)
        models = {me: Model(own) for me, own in node.arrived.items()}
        command = SyncCommand(SyncKind.transfer, sync_id, node.setup)

        def receive_weights(me: EngineRank) -> SyncReport:
            local.rank = me.rank
            own = command.to_engine(me.engine)
            weight_receiver.receive_weights(models[me], pickle.loads(weight_receiver.as_named_tensors(own)))
            return pickle.loads(own.setup.connect().get(weight_receiver.report_key(own, me.rank)))

        reports = node.on_all(lambda rank: node.senders[rank].send(command, have[rank]), receive_weights)
        assert [reports[me].error for me in models] == [""] * len(models)
        node.check(tensors)


def asleep_and_awake(tmp_path: str, in_files: bool) -> None:
    """Park the memory of two devices and take it back.

    It must return to its device, and all views must see it.
    """
    tensors = [torch.arange(12.0, device=f"fake:{index}") + index for index in range(2)]
    views = [tensor.view(3, 4)[1:] for tensor in tensors]
    expected = [tensor.tolist() for tensor in tensors]
    parking = Parking(tmp_path if in_files else None)
    parking._in_files = in_files
    with pytest.MonkeyPatch.context() as patch:
        # Page-locked memory needs CUDA.
        patch.setattr(
            "grpo_megatron.megatron.memory.parking.host_memory",
            lambda size: torch.empty(size, dtype=torch.uint8),
        )
        for _ in range(2):
            parking.park("values", unique_storages(tensors))
            assert [tensor.untyped_storage().nbytes() for tensor in tensors] == [0, 0]
            parking.unpark("values")
            assert [tensor.tolist() for tensor in tensors] == expected
            assert [view.tolist() for view in views] == [[values[4:8], values[8:]] for values in expected]
            assert [view.device.index for view in views] == [0, 1]


def parked_in_files(tmp_path: str) -> None:
    asleep_and_awake(tmp_path, in_files=True)


def parked_in_memory(tmp_path: str) -> None:
    asleep_and_awake(tmp_path, in_files=False)


def on_first_device(function: Callable) -> Callable:
    """Return the same function with its last argument, a device, replaced by the first device."""
    return lambda *arguments: function(*arguments[:-1], torch.device("fake:0"))


def returned_on_first_device(function: Callable) -> Callable:
    return lambda *arguments: function(*arguments).cpu().to("fake:0")


# Planted faults: (object, name in it, fault, whether deltas are sent). Each puts a tensor of rank 1 on device
# 0.
FAULTS = {
    "memory opened on the device of its sender": (shared_memory, "_open", on_first_device, False),
    "memory of the sender": (shared_memory, "_make", on_first_device, False),
    "factors of digests": (receiver, "odd_factors", on_first_device, False),
    "factors of the sender": (sender, "odd_factors", on_first_device, False),
    "a decoded delta": (delta, "decode", returned_on_first_device, True),
    "an encoded delta": (delta.Encoder, "encode", returned_on_first_device, True),
}


def with_fault(tmp_path: str, name: str) -> None:
    """Sync with a planted fault, which must raise an error that names both devices."""
    target, attribute, fault, use_delta = FAULTS[name]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(target, attribute, fault(getattr(target, attribute)))
        with pytest.raises(RuntimeError, match=r"fake:[01].* fake:[01]"):
            # The others wait for the rank that has failed.
            sync(Transport.shared_memory, tmp_path, use_delta, timeout=2.0)
