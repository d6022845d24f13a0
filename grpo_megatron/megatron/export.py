"""The trained model as an HF checkpoint, written by the ranks that hold it."""

import itertools

import torch
import torch.distributed as dist

from grpo_megatron.megatron.process_groups import rank_info
from grpo_megatron.megatron.weights import iterate_hf
from grpo_megatron.model.entries import Entry
from grpo_megatron.weights import hf_checkpoint


def save_hf(chunks, entries: dict[str, Entry], model_path: str, folder: str, dtype: torch.dtype) -> None:
    """Write aside, and put in place of what was there when whole. Collective over all ranks.

    model_path: of the original, for configuration and tokenizer. dtype: of the written tensors.
    """
    rank, partial = rank_info(), f"{folder}.partial"
    if rank.rank == 0:
        hf_checkpoint.start(partial, folder, model_path)
    dist.barrier()
    writer = hf_checkpoint.HFWriter(partial, f"{rank.rank:05d}")
    for name, tensor in iterate_hf(chunks, entries, dtype):
        writer.add(name, tensor)
    shards = writer.close()  # empty where nothing was gathered
    everyone: list = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (rank.pp_rank, shards))
    if rank.rank == 0:
        in_order = sorted((item for item in everyone if item[1]), key=lambda item: item[0])
        hf_checkpoint.copy_companions(model_path, partial, dtype)
        hf_checkpoint.finish(partial, list(itertools.chain.from_iterable(part for _, part in in_order)), folder)
    dist.barrier()
