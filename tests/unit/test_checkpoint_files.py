"""The files that ranks write of a checkpoint."""

import subprocess
import sys

import pytest

# One of two ranks. Each writes 2 of a tensor's 8 elements, so rank 0 finds that half of them are missing.
RANK = """
import datetime, sys, time
import torch
import torch.distributed as dist
from grpo_megatron.megatron.state.checkpoint_files import Writer
from grpo_megatron.megatron.state.shards import Rectangle

folder, rank = sys.argv[1], int(sys.argv[2])
store = dist.FileStore(f"{folder}/store", 2)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=datetime.timedelta(seconds=60))
part = Rectangle("weight", (8,), (2 * rank,), torch.ones(2), False)
writer = Writer(f"{folder}/checkpoint", [part], [], {}, {}, time.perf_counter())
try:
    writer.finish()
except Exception as error:
    print(type(error).__name__, error)
dist.barrier()
"""


@pytest.mark.slow
def test_an_error_in_rank_0s_metadata_reaches_every_rank(tmp_path):
    """The other ranks waited for rank 0 until the collective's timeout."""
    ranks = [
        subprocess.Popen([sys.executable, "-c", RANK, tmp_path, str(rank)], stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    try:
        said = [rank.communicate(timeout=300)[0].strip() for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert (
        said
        == [
            f"NotWritten the checkpoint {tmp_path}/checkpoint could not be written by rank 0: RuntimeError: "
            "weight, shape (8,): the ranks have not written each element exactly once"
        ]
        * 2
    )
