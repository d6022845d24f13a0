"""Check that engines can run a model with FP8 weights, given its config.json and the parallel layouts."""

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
    """Yield one sentence for each reason why engines cannot run the model with FP8 weights.

    Nothing is yielded unless rollout.engine.quantization is fp8. Call this function only if the parallel
    sizes of trainer and engines divide the model evenly, which other checks ensure.
    """
    if config.rollout.engine.quantization != Quantization.fp8:
        return
    path, dtype = config.model.path, engine_dtype(config.rollout.engine, config.model.path)
    if dtype != "bfloat16":
        yield (
            f"{_KEY} needs engines that compute in bfloat16, but they compute in {dtype}; set "
            "rollout.engine.dtype=bfloat16"
        )
    if arch.latent:
        yield (
            f"{_KEY} does not support latent attention, which {path} has, because SGLang merges kv_b_proj "
            "into other products after loading; set rollout.engine.quantization=none"
        )
        return
    yield from cut_matrices(
        arch, ParallelSizes.from_config(config.megatron), EngineLayout.from_config(config.rollout.engine)
    )


def cut_matrices(arch: Architecture, sizes: ParallelSizes, layout: EngineLayout) -> Iterator[str]:
    """Yield one sentence for each kind of layer in which a rank's shard would cut a 128 x 128 block.

    A shard with a cut block cannot be quantised with one scale per block. Trainer and engine are checked
    separately, so there may be two sentences about a kind of layer.

    sizes: parallel sizes of the trainer.
    layout: division of the model over an engine's ranks.
    """
    kinds = {kind(name): entry for name, entry in weight_map(arch).items() if is_block_scaled(entry)}
    for entry in kinds.values():
        yield from _cut(entry, sizes, layout)


def _cut(entry: Entry, sizes: ParallelSizes, layout: EngineLayout) -> Iterator[str]:
    """Yield up to two sentences about cut blocks of one parameter: one for the trainer, one for the engine.

    The sentence names the first rank whose shard cuts a block. Nothing is yielded if no shard cuts a block.

    entry: weight map entry of the parameter.
    sizes: parallel sizes of the trainer.
    layout: division of the model over an engine's ranks.
    """
    parts, engine_parts = sizes.etp if entry.expert else sizes.tp, entry.engine_parts(layout)
    key = f"megatron.{'expert_' if entry.expert else ''}tensor_parallel={parts}"
    engine_key = f"rollout.engine.tensor_parallel={layout.tp}" + (
        f" / expert_parallel={layout.ep}" if entry.expert else ""
    )
    ours = [stacked_by_tensor(entry.megatron_pieces(parts, rank)) for rank in range(parts)]
    theirs = [entry.engine_pieces(layout, rank) for rank in range(layout.tp)]
    for where, several, ranks in ((key, parts > 1, ours), (engine_key, engine_parts > 1, theirs)):
        found = [(rank, piece) for rank, pieces in enumerate(ranks) for piece in cut_blocks(pieces)]
        if found:
            rank, piece = found[0]
            spans = " x ".join(
                f"[{first}, {first + size})" for first, size in zip(piece.start, piece.shape, strict=True)
            )
            yield (
                f"{_KEY}: with {where} rank {rank} has {spans} of {piece.hf}, which splits blocks of "
                f"{BLOCK} x {BLOCK}; {'use fewer ranks, or ' if several else ''}set "
                "rollout.engine.quantization=none"
            )
