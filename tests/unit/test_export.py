"""Export of an HF checkpoint by several ranks: if one cannot write, all raise, and none waits forever.

The ranks are threads here, with a stand-in for torch.distributed.
"""

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

from grpo_megatron.errors import UserError
from grpo_megatron.megatron.state import export
from grpo_megatron.weights import hf_writer

RANKS, TENSORS = 3, ("a", "b")


class Threads:
    """The collectives of torch.distributed that an export uses, for ranks that are threads.

    A rank that waits alone for ten seconds gets BrokenBarrierError.
    """

    def __init__(self):
        self.own, self.barrier_of_all = threading.local(), threading.Barrier(RANKS, timeout=10)
        self.sent = [None] * RANKS

    def barrier(self):
        self.barrier_of_all.wait()

    def get_world_size(self):
        return RANKS

    def all_gather_object(self, received, item):
        self.sent[self.own.rank] = item
        self.barrier()
        received[:] = self.sent
        self.barrier()

    def broadcast_object_list(self, items, src):
        received = [None] * RANKS
        self.all_gather_object(received, list(items))
        items[:] = received[src]


@pytest.fixture
def ranks(monkeypatch):
    threads = Threads()

    def gathered(chunks, entries, dtype, values):
        """Yield one tensor after the other, each on rank 0. The others send their shards."""
        for name in TENSORS:
            threads.barrier()
            if threads.own.rank == 0:
                yield name, torch.ones(2)

    monkeypatch.setattr(export, "dist", threads)
    monkeypatch.setattr(export, "rank_info", lambda: SimpleNamespace(rank=threads.own.rank, pp_rank=0))
    monkeypatch.setattr(export, "iterate_hf", gathered)
    monkeypatch.setattr(export, "MergedWeights", lambda chunks: {})
    monkeypatch.setattr(hf_writer, "copy_companions", lambda *arguments: None)
    return threads


def exported(threads: Threads, folder) -> list[str]:
    """Export on all ranks. Return the message of each rank's UserError, or "" for each that has ended."""
    config = SimpleNamespace(model=SimpleNamespace(path=f"{folder.parent}/model"))
    arch = SimpleNamespace(scalar_head=False)

    def on(rank: int) -> str:
        threads.own.rank = rank
        try:
            export.save_hf([], {}, config, arch, str(folder), torch.float32, {})
        except UserError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(RANKS) as pool:
        return list(pool.map(on, range(RANKS)))


def test_all_ranks_export(ranks, tmp_path):
    assert exported(ranks, tmp_path / "hf") == [""] * RANKS
    assert (tmp_path / "hf" / "model.safetensors").exists()


def test_all_ranks_refuse_to_overwrite_the_model(ranks, tmp_path):
    """Planted bug: rank 0 raises, and the others wait for it in a collective."""
    messages = exported(ranks, tmp_path / "model")
    assert len(set(messages)) == 1
    assert "from which the model was loaded" in messages[0]


@pytest.mark.parametrize("place", ["start", "HFWriter.add", "HFWriter.close", "finish"])
def test_a_rank_that_cannot_write_ends_the_export_on_all_ranks(ranks, tmp_path, monkeypatch, place):
    def full(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(f"grpo_megatron.weights.hf_writer.{place}", full)
    messages = exported(ranks, tmp_path / "hf")
    assert len(set(messages)) == 1
    assert "cannot be written: No space left on device" in messages[0]
    assert not (tmp_path / "hf").exists()
