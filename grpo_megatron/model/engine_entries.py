"""Weight map entries for an engine: one for each parameter of the engine."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from grpo_megatron.model.arrangement import Plain
from grpo_megatron.model.block_scaled import elements, is_block_scaled, scales
from grpo_megatron.model.entries import EngineLayout, Entry
from grpo_megatron.model.pieces import Shape


def engine_entries(entries: Iterable[Entry], layout: EngineLayout) -> list[Entry]:
    """Return the weight map entries for an engine with the given layout.

    An entry says how a parameter is named and sharded in Hugging Face files, Megatron and the engine. The
    entry of a parameter for which the engine has several is replaced by one entry for each of them. For an
    FP8 engine, the entry of each linear layer's weight is replaced by two entries: one for the FP8 elements,
    and one for their scales. All other entries stay the same.

    entries: the model's entries, which do not depend on the engine.
    """
    found = []
    for entry in entries:
        if entry.engine_shares:
            found += _of_shares(entry)
        else:
            found += [elements(entry), scales(entry)] if layout.fp8 and is_block_scaled(entry) else [entry]
    return found


def _of_shares(entry: Entry) -> Iterator[Entry]:
    shapes = dict(zip(entry.hf, entry.shapes, strict=True))
    for share in entry.engine_shares:
        yield replace(
            entry,
            hf=share.hf,
            shapes=tuple(shapes[name] for name in share.hf),
            engine=share.engine,
            engine_axis=0,
            kind=_Share(entry, share.kind),
            engine_shares=(),
        )


@dataclass(frozen=True)
class _Share(Plain):
    """Layout of those HF tensors of a Megatron parameter that make up one parameter of the engine.

    whole: entry of the Megatron parameter, with all its HF tensors.
    kind: layout in the engine.
    """

    whole: Entry
    kind: Plain

    def shape(self, shapes, axis, parts):
        return self.whole.megatron_shape(parts)

    def pieces(self, hf, shapes, axis, parts, rank):
        return [piece for piece in self.whole.megatron_pieces(parts, rank) if piece.hf in hf]

    def engine_shape(self, shapes, axis, parts):
        return self.kind.engine_shape(shapes, axis, parts)

    def engine_pieces(self, hf, shapes, axis, parts, rank):
        return self.kind.engine_pieces(hf, shapes, axis, parts, rank)


def engine_shapes(entries: Iterable[Entry], layout: EngineLayout) -> dict[str, Shape]:
    """Return {name: shape} of all parameters of an engine. The shape is the one that each engine rank has.

    entries: the model's weight map entries for this engine, as `engine_entries` returns them.
    layout: division of the model over the engine's ranks.
    """
    shapes: dict[str, Shape] = {}
    for entry in entries:
        if entry.exported:
            shape = entry.engine_shape(layout)
            # If several entries share a parameter, the last one ends where the parameter ends.
            shapes[entry.engine] = max(shape, shapes.get(entry.engine, shape))
    return shapes
