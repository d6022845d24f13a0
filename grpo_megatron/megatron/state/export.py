"""Export of the trained model as an HF checkpoint. All ranks write in parallel."""

import itertools
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

from grpo_megatron.config.schema import Config
from grpo_megatron.data.conversations import pad_token
from grpo_megatron.megatron.layers.lora import MergedWeights
from grpo_megatron.megatron.process_groups import rank_info
from grpo_megatron.megatron.state.hf_weights import iterate_hf, local_parameters
from grpo_megatron.model.architecture import Architecture
from grpo_megatron.model.entries import Entry
from grpo_megatron.model.families import reward_architecture
from grpo_megatron.weights import hf_writer, peft_checkpoint


def save_hf(
    chunks,
    entries: dict[str, Entry],
    config: Config,
    arch: Architecture,
    folder: str,
    dtype: torch.dtype,
    adapters: dict[str, Entry],
) -> None:
    """Write the current weights as an HF checkpoint. All ranks must call this.

    The files are written to `folder`.partial, which replaces `folder` at the end. So an incomplete export
    never has the name `folder`.

    chunks: model chunks of this rank.
    entries: weight map of the model: {Megatron parameter name: description of its HF tensors}.
    config: configuration of the run. The config.json and the tokenizer of its model.path are copied.
    dtype: dtype of the written tensors.
    adapters: weight map of the LoRA adapters; empty if there are none. Adapters are merged into the weights,
        and also written separately to `folder`/adapter.

    Raises UserError on rank 0 if `folder` is the folder of the original model.
    """
    rank, partial, model_path = rank_info(), f"{folder}.partial", config.model.path
    if rank.rank == 0:
        hf_writer.start(partial, folder, model_path)
    dist.barrier()
    shards = _write(partial, iterate_hf(chunks, entries, dtype, MergedWeights(chunks)))
    if adapters:
        own = local_parameters(chunks, adapters=True)
        parts = _write(f"{partial}/adapter", iterate_hf(chunks, adapters, dtype, own))
    if rank.rank == 0:
        if adapters:
            names, lora = [name for name, _ in parts], config.megatron.lora
            peft_checkpoint.finish(f"{partial}/adapter", names, lora, model_path)
        hf_writer.copy_companions(
            model_path, partial, dtype, _of_reward_model(arch, model_path) if arch.scalar_head else {}
        )
        hf_writer.finish(partial, shards, folder)
    dist.barrier()


def _of_reward_model(arch: Architecture, model_path: str) -> dict[str, Any]:
    """Return the config.json entries that make transformers load the checkpoint as a reward model."""
    return {
        "architectures": [reward_architecture(arch)],
        "id2label": {"0": "reward"},
        "label2id": {"reward": 0},
        "pad_token_id": pad_token(model_path),
    }


def _write(folder: str, tensors: Iterable[tuple[str, torch.Tensor]]) -> list[tuple[str, dict[str, int]]]:
    """Write this rank's tensors to its own safetensors files in `folder`. All ranks must call this.

    tensors: (HF name, tensor) pairs of this rank; may be empty.

    Returns (file name, {tensor name: size in bytes}) for each file of all ranks, ordered by pipeline stage.
    """
    rank = rank_info()
    writer = hf_writer.HFWriter(folder, f"{rank.rank:05d}")
    for name, tensor in tensors:
        writer.add(name, tensor)
    shards = writer.close()  # empty where nothing was gathered
    everyone: list = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (rank.pp_rank, shards))
    in_order = sorted((item for item in everyone if item[1]), key=lambda item: item[0])
    return list(itertools.chain.from_iterable(part for _, part in in_order))
