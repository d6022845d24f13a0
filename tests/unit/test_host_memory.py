"""Host memory that is kept: its size, lifetime and contents. tests/gpu checks that it is page-locked."""

import os
import socket
import sys
from pathlib import Path

import pytest
import torch

from grpo_megatron.cluster.memory import occupied
from grpo_megatron.errors import UserError
from grpo_megatron.megatron.memory.host import HostArena, host_memory
from grpo_megatron.megatron.memory.parking import Parking
from grpo_megatron.megatron.memory.training import unique_storages
from tests.tools import no_file_beyond

MIB = 1 << 20


def test_memory_is_as_large_as_asked_for_and_lives_as_long_as_its_tensors():
    before = occupied()
    memory = host_memory(65 * MIB).fill_(1)
    part = memory[MIB:].view(torch.float32)
    del memory
    assert 64 * MIB < occupied() - before < 80 * MIB
    assert part.view(torch.uint8).min() == 1
    del part
    assert occupied() - before < 16 * MIB


def test_tensors_of_an_arena_do_not_overlap_and_its_memory_is_used_again():
    arena = HostArena(block_bytes=1000)
    values = [
        torch.randn(3, 5),
        torch.arange(7, dtype=torch.bfloat16),
        torch.randn(1000),
        torch.randn(2),
        torch.ones(1).bool(),
    ]
    blocks = []
    for _ in range(2):
        kept = [arena.like(tensor).copy_(tensor) for tensor in values]
        assert all(
            torch.equal(own, tensor) and own.dtype == tensor.dtype
            for own, tensor in zip(kept, values, strict=True)
        )
        blocks.append(sorted({tensor.untyped_storage().data_ptr() for tensor in kept}))
        arena.clear()
    assert blocks[0] == blocks[1]
    assert len(blocks[0]) == 2, "what is larger than a block has one of its own"


def test_what_is_parked_again_waits_in_the_same_memory():
    parking, values = Parking(), torch.randn(300)
    parking._in_files = False  # as with CUDA
    expected, places = values.clone(), set()
    for _ in range(2):
        parking.park("values", unique_storages([values]))
        assert values.untyped_storage().nbytes() == 0
        places.add(parking._pinned["values-0"].data_ptr())
        parking.unpark("values")
        assert torch.equal(values, expected)
    assert len(places) == 1
    longer = torch.randn(400)
    expected = longer.clone()
    parking.park("values", unique_storages([longer]))
    parking.unpark("values")
    assert torch.equal(longer, expected)


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
def test_a_file_of_what_is_parked_has_no_name(tmp_path):
    """A rank ends by SIGKILL, and a file with a name would stay on the disk."""

    def open_files() -> int:
        links = [os.readlink(link) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
        return sum(link.startswith(str(tmp_path)) for link in links)

    parking, tensors = Parking(str(tmp_path)), [torch.randn(300), torch.randn(70_000), torch.arange(5)]
    expected = [tensor.clone() for tensor in tensors]
    for _ in range(2):
        parking.park("values", unique_storages(tensors))
        assert all(tensor.untyped_storage().nbytes() == 0 for tensor in tensors)
        assert list(tmp_path.iterdir()) == []
        assert open_files() == 1
        parking.unpark("values")
        assert all(torch.equal(tensor, before) for tensor, before in zip(tensors, expected, strict=True))
        assert open_files() == 0


def test_a_full_disk_costs_nothing_that_is_parked(tmp_path):
    """The storages that had been written before the disk was full stayed empty."""
    parking, tensors = Parking(str(tmp_path)), [torch.randn(300), torch.arange(5), torch.randn(70_000)]
    expected = [tensor.clone() for tensor in tensors]
    for _ in range(2):
        # Just enough for the first two, and not enough for a single byte
        for size in (50_000, 0):
            with no_file_beyond(size), pytest.raises(UserError) as raised:
                parking.park("values", unique_storages(tensors))
            assert str(raised.value).startswith(
                f"megatron.offload_folder={tmp_path} (on {socket.gethostname()}) cannot be written: "
                "File too large; "
            )
            assert all(map(torch.equal, tensors, expected))
        parking.park("values", unique_storages(tensors))
        parking.unpark("values")
        assert all(map(torch.equal, tensors, expected))
