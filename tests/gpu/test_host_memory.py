"""Page-locked memory, and the tensors that are kept in it."""

import gc

import pytest
import torch

from grpo_megatron.config.schema import OptimizerConfig, Precision, RefConfig
from grpo_megatron.megatron import process_groups
from grpo_megatron.megatron.memory.host import HostArena, host_memory
from grpo_megatron.megatron.memory.parking import Parking
from grpo_megatron.megatron.memory.training import unique_storages
from grpo_megatron.model.parallel_sizes import ParallelSizes
from tests.configs import actor_config
from tests.models import tiny_model

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]


def test_memory_is_locked_as_long_as_a_tensor_is_on_it():
    size = (1 << 20) + 4096
    for _ in range(3):  # the same addresses again: to lock what is still locked would be an error
        memory = host_memory(size)
        part = memory[4096:]
        assert memory.nbytes == size
        del memory
        gc.collect()
        assert part.is_pinned()
        del part
        gc.collect()


def test_copies_do_not_wait_for_the_host():
    values = torch.randn(1 << 20, device="cuda")
    kept = HostArena(block_bytes=1 << 20).like(values)
    torch.cuda._sleep(1 << 30)
    kept.copy_(values, non_blocking=True)
    assert not torch.cuda.current_stream().query(), "the copy should still be waiting for the device"
    torch.cuda.synchronize()
    assert torch.equal(kept, values.cpu())


def test_what_is_parked_again_has_the_same_memory():
    parking, values = Parking(), torch.randn(3 << 20, device="cuda")
    expected, places = values.clone(), set()
    for _ in range(3):
        parking.park("values", unique_storages([values]))
        assert values.untyped_storage().nbytes() == 0
        places.add(parking._pinned["values-0"].data_ptr())
        parking.unpark("values")
        assert torch.equal(values, expected)
    assert len(places) == 1


def test_what_is_parked_in_files_comes_back(tmp_path):
    """The host copies used to be freed before they were written to the file."""
    parking, tensors = (
        Parking(str(tmp_path)),
        [torch.randn(size, device="cuda") for size in (300, 3 << 20, 70_000)],
    )
    expected = [tensor.clone() for tensor in tensors]
    parking.park("values", unique_storages(tensors))
    parking.unpark("values")
    assert all(torch.equal(tensor, before) for tensor, before in zip(tensors, expected, strict=True))


@pytest.mark.parametrize("piece", [4096, 64 << 20], ids=["pieces", "whole"])
@pytest.mark.parametrize("on_host", [True, False], ids=["host", "device"])
def test_weights_are_exchanged_bit_for_bit(tmp_path, piece, on_host):
    """Many small pieces reveal a copy that does not wait for the one before it."""
    pytest.importorskip("ray")  # the controller's collaborators use it, and nothing else in this file
    from tests.parallel import references

    models = [tiny_model(tmp_path / str(number), "qwen3", seed=number) for number in range(2)]
    process_groups.initialize(ParallelSizes(), 0, f"file://{tmp_path}/store", seed=0)
    try:
        config = actor_config(
            models[0],
            ParallelSizes(),
            OptimizerConfig(),
            Precision.bf16,
            with_reference=True,
            ref=RefConfig(path=models[1], offload=on_host),
        )
        assert references.exchanged(config, piece) == (True, True, True)
    finally:
        process_groups.destroy()
