"""Export of the trained model as an HF checkpoint. All ranks write in parallel."""

import itertools
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from grpo_megatron.config.schema import Config
from grpo_megatron.data.conversations import pad_token
from grpo_megatron.errors import UserError
from grpo_megatron.files import writing
from grpo_megatron.megatron.layers.lora import MergedWeights
from grpo_megatron.megatron.process_groups import rank_info
from grpo_megatron.megatron.state.hf_weights import iterate_hf, local_parameters
from grpo_megatron.megatron.state.stacked_export import with_stacks
from grpo_megatron.model.architecture import Architecture
from grpo_megatron.model.entries import Entry, hf_shapes
from grpo_megatron.model.families import reward_architecture
from grpo_megatron.weights import hf_writer, peft_checkpoint
from grpo_megatron.weights.stacked_experts import stacks_of
from grpo_megatron.weights.stored import read_stored
from grpo_megatron.weights.stored_names import in_files

_VISION = "part-vision.safetensors"  # until `hf_writer.finish` renames the files


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

    Raises UserError on all ranks if `folder` is the folder of the original model, or if any rank cannot write
    its files.
    """
    partial_folder, model_path = f"{folder}.partial", config.model.path
    _on_rank_0(folder, partial(hf_writer.start, partial_folder, folder, model_path))
    stored = read_stored(Path(model_path))
    prefix, tensors = stored.prefix, iterate_hf(chunks, entries, dtype, MergedWeights(chunks))
    if stored.stacks:
        tensors = with_stacks(tensors, stacks_of(hf_shapes(entries), stored.stacks))
    shards = _write(partial_folder, prefix, tensors)
    parts = []
    if adapters:
        own = local_parameters(chunks, adapters=True)
        parts = _write(f"{partial_folder}/adapter", prefix, iterate_hf(chunks, adapters, dtype, own))

    def complete() -> None:
        if adapters:
            names, lora = [name for name, _ in parts], config.megatron.lora
            peft_checkpoint.finish(f"{partial_folder}/adapter", names, lora, model_path)
        changes = _of_reward_model(arch, model_path) if arch.scalar_head else {}
        hf_writer.copy_companions(model_path, partial_folder, dtype, changes)
        vision = hf_writer.copy_vision(model_path, Path(partial_folder, _VISION))
        hf_writer.finish(partial_folder, [*shards, (_VISION, vision)] if vision else shards, folder)

    _on_rank_0(folder, complete)


def _on_rank_0(folder: str, write: Callable[[], None]) -> None:
    """Call a function on rank 0, while the other ranks wait. All ranks must call this.

    folder: the folder that the function writes, for the error message.

    Raises UserError on all ranks if the function fails, so that no rank waits for it forever.
    """
    problem = [_problem(folder, write) if rank_info().rank == 0 else ""]
    dist.broadcast_object_list(problem, src=0)
    if problem[0]:
        raise UserError(problem[0])


def _problem(folder: str, write: Callable[..., Any], *arguments: Any) -> str:
    """Call a function that writes `folder`. Return the message of its UserError or OSError; "" if none."""
    try:
        with writing(folder):
            write(*arguments)
    except UserError as error:
        return str(error)
    return ""


def _of_reward_model(arch: Architecture, model_path: str) -> dict[str, Any]:
    """Return the config.json entries that make transformers load the checkpoint as a reward model."""
    return {
        "architectures": [reward_architecture(arch)],
        "id2label": {"0": "reward"},
        "label2id": {"reward": 0},
        "pad_token_id": pad_token(model_path),
    }


def _write(
    folder: str, prefix: str, tensors: Iterable[tuple[str, torch.Tensor]]
) -> list[tuple[str, dict[str, int]]]:
    """Write this rank's tensors to its own safetensors files in `folder`. All ranks must call this.

    prefix: prefix of the language model's tensors in the files, see weights.stored_names.
    tensors: (HF name, tensor) pairs of this rank; may be empty.

    Returns (file name, {tensor name: size in bytes}) for each file of all ranks, ordered by pipeline stage.
    Raises UserError on all ranks if any rank cannot write.
    """
    rank = rank_info()
    writer, problem = hf_writer.HFWriter(folder, f"{rank.rank:05d}"), ""
    # A rank that cannot write still takes all tensors, because the other ranks send their shards of them.
    for name, tensor in tensors:
        problem = problem or _problem(folder, writer.add, in_files(name, prefix), tensor)
    problem = problem or _problem(folder, writer.close)
    everyone: list = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (rank.pp_rank, writer.shards, problem))
    if problems := [problem for *_, problem in everyone if problem]:
        raise UserError(problems[0])
    in_order = sorted((item for item in everyone if item[1]), key=lambda item: item[0])
    return list(itertools.chain.from_iterable(part for _, part, _ in in_order))
