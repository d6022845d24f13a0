"""HF checkpoint <-> Megatron distributed checkpoint, in one process, by the trainer's own code."""

import json
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path

import torch

from grpo_megatron.errors import UserError
from grpo_megatron.megatron.spec import ModelSpec
from grpo_megatron.model.families import read_architecture
from grpo_megatron.model.parallel_sizes import ParallelSizes
from grpo_megatron.weights import hf_checkpoint

_NOTE = "converted.json"  # beside the shards: says what they were made of
_WEIGHTS = "actor"  # the same place as in a trainer's checkpoint


@contextmanager
def _single_rank_model(hf_folder: str, dtype: torch.dtype):
    """(model chunks, weight map) on one rank, values not yet filled."""
    from grpo_megatron.megatron import process_groups
    from grpo_megatron.megatron.model import build_model
    from grpo_megatron.model.families import weight_map

    arch = read_architecture(hf_folder)
    with tempfile.TemporaryDirectory() as folder:
        process_groups.initialize(ParallelSizes(), 0, f"file://{folder}/store", seed=0)
        try:
            yield build_model(arch, ModelSpec(ParallelSizes(), dtype)), weight_map(arch)
        finally:
            process_groups.destroy()


def hf_to_megatron(source: str, target: str) -> None:
    """Write `target`/actor (weights in Megatron's distributed format, loadable in any layout) and a
    copy of the HF configuration and tokenizer in `target`/hf. dtype stays that of the source."""
    from grpo_megatron.megatron import sharded_state
    from grpo_megatron.megatron.weights import load_hf

    if Path(target).exists() and any(Path(target).iterdir()):
        raise UserError(f"{target} is not empty; choose another folder")
    reader = hf_checkpoint.HFCheckpoint(source)
    if reader.note:
        print(reader.note, file=sys.stderr)
    dtype = read_architecture(source).dtype
    with _single_rank_model(source, dtype) as (chunks, entries):
        load_hf(chunks, reader, entries)
        hf_checkpoint.copy_companions(source, f"{target}/hf", dtype)
        sharded_state.save_weights(f"{target}/{_WEIGHTS}", chunks)
    note = {"source": str(Path(source).absolute()), "dtype": str(dtype).removeprefix("torch.")}
    Path(target, _NOTE).write_text(json.dumps(note), encoding="utf-8")


def megatron_to_hf(source: str, target: str, hf_folder: str | None, dtype: torch.dtype | None = None) -> None:
    """Write the weights of a converted or a trainer's checkpoint as an HF checkpoint.

    source: a folder with actor/ in it. hf_folder: where configuration and tokenizer come from; a
    converted checkpoint brings its own. dtype: of the written tensors, None: as in config.json.
    """
    from grpo_megatron.megatron import sharded_state
    from grpo_megatron.megatron.weights import iterate_hf

    companions = hf_folder or f"{source}/hf"
    if not Path(source, _WEIGHTS).is_dir():
        raise UserError(f"{source} holds no {_WEIGHTS}/ folder with weights")
    if not Path(companions, "config.json").is_file():
        raise UserError(f"{companions} has no config.json; say by --hf which model this checkpoint is of")
    dtype = dtype or read_architecture(companions).dtype
    with _single_rank_model(companions, dtype) as (chunks, entries):
        sharded_state.load_weights(f"{source}/{_WEIGHTS}", chunks)
        partial = f"{target}.partial"
        hf_checkpoint.start(partial, target, companions)
        hf_checkpoint.copy_companions(companions, partial, dtype)
        writer = hf_checkpoint.HFWriter(partial, "000")
        for name, tensor in iterate_hf(chunks, entries):
            writer.add(name, tensor)
        hf_checkpoint.finish(partial, writer.close(), target)
