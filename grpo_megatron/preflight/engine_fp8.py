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
    if arch.delta is not None:
        yield (
            f"{_KEY} does not support gated delta networks, which {path} has, because SGLang also stores "
            "their projections in FP8; set rollout.engine.quantization=none"
        )
        return
    if arch.sinks:
        yield (
            f"{_KEY} does not support {path}, because in SGLang the rows of its experts' gate and up "
            "projections alternate, so both would share one scale; set rollout.engine.quantization=none"
        )
        return
    yield from cut_matrices(
        arch, ParallelSizes.from_config(config.megatron), EngineLayout.from_config(config.rollout.engine)
    )


def cut_matrices(arch: Architecture, sizes: ParallelSizes, layout: EngineLayout) -> Iterator[str]:
    """Yield sentences about the kinds of layers in which a rank's shard would cut a 128 x 128 block.

    FP8 weights have one scale for each block, so a shard with a cut block cannot be quantised. One parameter
    of each kind of layer is checked. There are up to two sentences about a kind: one for the trainer's ranks,
    and one for the ranks of an engine.

    sizes: parallel sizes of the trainer.
    layout: division of the model over an engine's ranks.
    """
    kinds = {kind(name): entry for name, entry in weight_map(arch).items() if is_block_scaled(entry)}
    for entry in kinds.values():
        yield from _cut(entry, sizes, layout)


def _cut(entry: Entry, sizes: ParallelSizes, layout: EngineLayout) -> Iterator[str]:
    """Yield up to two sentences about a parameter whose shards would cut 128 x 128 blocks: trainer, engine.

    If a shard of a trainer rank cuts a block, a sentence names the first such rank. If a shard of an engine
    rank cuts a block, another sentence names that rank.

    entry: the parameter, with its HF tensors and its shards in trainer and engine.
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
