"""Which models engines cannot have in FP8, known from config.json and the layouts alone."""

from collections.abc import Iterator

from grpo_megatron.config.engine import Quantization
from grpo_megatron.config.schema import Config
from grpo_megatron.model.architecture import Architecture
from grpo_megatron.model.block_scaled import BLOCK, cut_blocks, is_block_scaled, stacked_by_tensor
from grpo_megatron.model.entries import EngineLayout, Entry
from grpo_megatron.model.families import weight_map
from grpo_megatron.model.parallel_sizes import ParallelSizes
from grpo_megatron.preflight.fp8_sizes import kind
from grpo_megatron.sglang.arguments import engine_dtype

_KEY = "rollout.engine.quantization=fp8"


def engine_fp8_violations(config: Config, arch: Architecture) -> Iterator[str]:
    """One sentence each. The layouts divide the model."""
    if config.rollout.engine.quantization != Quantization.fp8:
        return
    path, dtype = config.model.path, engine_dtype(config.rollout.engine, config.model.path)
    if dtype != "bfloat16":
        yield f"{_KEY} needs engines that compute in bfloat16, which is {dtype} here: set rollout.engine.dtype=bfloat16"
    if arch.moe or arch.latent:
        yield f"{_KEY} is for dense models with grouped queries, {path} has experts or latent attention; set it to none"
        return
    sizes, layout = ParallelSizes.from_config(config.megatron), EngineLayout.from_config(config.rollout.engine)
    kinds = {kind(name): entry for name, entry in weight_map(arch).items() if is_block_scaled(entry)}
    for entry in kinds.values():
        yield from _cut(entry, sizes.tp, layout)


def _cut(entry: Entry, tp: int, layout: EngineLayout) -> Iterator[str]:
    """Of the trainer's ranks and the engines', the first that has a part of a block."""
    ours = [stacked_by_tensor(entry.megatron_pieces(tp, rank)) for rank in range(tp)]
    theirs = [entry.engine_pieces(layout, rank) for rank in range(layout.tp)]
    for key, ranks in (("megatron.tensor_parallel", ours), ("rollout.engine.tensor_parallel", theirs)):
        found = [(rank, piece) for rank, pieces in enumerate(ranks) for piece in cut_blocks(pieces)]
        if found:
            rank, piece = found[0]
            spans = " x ".join(f"[{first}, {first + size})" for first, size in zip(piece.start, piece.shape, strict=True))
            yield (
                f"{_KEY}: with {key}={len(ranks)} rank {rank} has {spans} of {piece.hf}, which cuts blocks of "
                f"{BLOCK} x {BLOCK}; {'use fewer ranks, or ' if len(ranks) > 1 else ''}set it to none"
            )
