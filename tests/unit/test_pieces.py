"""Rectangles of HF tensors in Megatron's and the engine's parameters."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_megatron.model.arrangement import QKV, GateUp, Vocab
from grpo_megatron.model.engine_entries import engine_shapes
from grpo_megatron.model.entries import EngineLayout, Entry, Expert
from grpo_megatron.model.pieces import Piece, box, moves

HEADS, KV_HEADS, HEAD_DIM, HIDDEN = 8, 4, 6, 10


def qkv(kv_heads=KV_HEADS, columns=(HIDDEN,)):
    shapes = tuple((heads * HEAD_DIM, *columns) for heads in (HEADS, kv_heads, kv_heads))
    return Entry(("q", "k", "v"), shapes, "qkv", 0, "qkv_proj", 0, QKV(HEADS, kv_heads, HEAD_DIM))


ENTRIES = {
    "column": Entry(("w",), ((24, HIDDEN),), "w", 0, "w", 0),
    "row": Entry(("w",), ((HIDDEN, 24),), "w", 1, "w", 1),
    "norm": Entry(("n",), ((HIDDEN,),), "n", None, "n", None),
    "gate_up": Entry(("g", "u"), ((24, HIDDEN),) * 2, "fc1", 0, "gate_up", 0, GateUp()),
    "vocab": Entry(("e",), ((61, HIDDEN),), "e", 0, "e", 0, Vocab()),
    "qkv": qkv(),
    "qkv_bias": qkv(columns=()),
    "few_kv_heads": qkv(kv_heads=2),
}


def hf_tensors(entry):
    """Return HF tensors in which every element has a value of its own."""
    first, found = 1, {}
    for name, shape in zip(entry.hf, entry.shapes, strict=True):
        count = torch.Size(shape).numel()
        found[name] = torch.arange(first, first + count).view(shape)
        first += count
    return found


def filled(shape, pieces, tensors):
    """Return a parameter made of its pieces, 0 where no piece is."""
    local = torch.zeros(shape, dtype=torch.int64)
    for piece in pieces:
        view = piece.of(local)
        assert not view.any(), "two pieces overlap"
        view.copy_(tensors[piece.hf][box(piece.start, piece.shape)])
    return local


def megatron_shards(entry, parts):
    tensors = hf_tensors(entry)
    return [
        filled(entry.megatron_shape(parts), entry.megatron_pieces(parts, rank), tensors)
        for rank in range(parts)
    ]


@pytest.mark.parametrize("parts", [1, 2, 4, 8])
@pytest.mark.parametrize("name", ENTRIES)
def test_megatrons_shards_are_cut_from_its_fused_tensor(name, parts):
    """The fused tensor, made by reshaping the whole, is the reference."""
    entry = ENTRIES[name]
    tensors = list(hf_tensors(entry).values())
    if name.startswith(("qkv", "few_kv_heads")):
        groups = entry.kind.num_kv_heads
        grouped = [tensor.reshape(groups, -1, *tensor.shape[1:]) for tensor in tensors]
        fused = torch.cat(grouped, dim=1).flatten(0, 1)
        expected = fused.chunk(parts)
    elif name == "gate_up":
        expected = [
            torch.cat(halves) for halves in zip(*(tensor.chunk(parts) for tensor in tensors), strict=True)
        ]
    elif name == "vocab":
        rows = -(-61 // parts)
        padded = torch.cat([tensors[0], tensors[0].new_zeros(rows * parts - 61, HIDDEN)])
        expected = padded.chunk(parts)
    else:
        expected = [tensors[0]] * parts if entry.axis is None else tensors[0].chunk(parts, dim=entry.axis)
    for shard, part in zip(megatron_shards(entry, parts), expected, strict=True):
        assert torch.equal(shard, part)


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
@pytest.mark.parametrize("kv_heads", [4, 1])
def test_the_engines_qkv_is_queries_then_keys_then_values_of_each_rank(tp, kv_heads):
    entry = qkv(kv_heads)
    tensors = hf_tensors(entry)
    for rank in range(tp):
        heads = {"q": range(rank * HEADS // tp, (rank + 1) * HEADS // tp)}
        kept = max(1, kv_heads // tp)
        first = rank * kv_heads // tp
        heads["k"] = heads["v"] = range(first, first + kept)
        expected = [
            tensors[name].view(-1, HEAD_DIM, HIDDEN)[list(heads[name])].flatten(0, 1) for name in "qkv"
        ]
        local = filled(
            entry.engine_shape(EngineLayout(tp)), entry.engine_pieces(EngineLayout(tp), rank), tensors
        )
        assert torch.equal(local, torch.cat(expected))


def test_the_engines_vocabulary_is_padded_to_64_words():
    entry = ENTRIES["vocab"]
    shards = [
        filled(
            entry.engine_shape(EngineLayout(2)), entry.engine_pieces(EngineLayout(2), rank), hf_tensors(entry)
        )
        for rank in (0, 1)
    ]
    assert [len(shard) for shard in shards] == [32, 32]
    assert torch.equal(torch.cat(shards)[:61], hf_tensors(entry)["e"])


@pytest.mark.parametrize(("tp", "ep"), [(1, 1), (2, 1), (2, 2), (4, 2)])
def test_the_engines_experts_are_stacked(tp, ep):
    count, layout = 4, EngineLayout(tp, ep)
    entries = [
        Entry(
            (f"g{n}", f"u{n}"),
            ((24, HIDDEN),) * 2,
            f"fc1.{n}",
            0,
            "w13",
            0,
            GateUp(),
            expert=Expert(n, count),
        )
        for n in range(count)
    ]
    tensors = [hf_tensors(entry) for entry in entries]
    shape = engine_shapes(entries, layout)["w13"]
    assert shape == (count // ep, 2 * 24 // layout.moe_tp, HIDDEN)
    for rank in range(tp):
        local = torch.zeros(shape, dtype=torch.int64)
        for entry, own in zip(entries, tensors, strict=True):
            for piece in entry.engine_pieces(layout, rank):
                piece.of(local).copy_(own[piece.hf][box(piece.start, piece.shape)])
        held = range(rank // layout.moe_tp * count // ep, (rank // layout.moe_tp + 1) * count // ep)
        for number, expert in enumerate(held):
            parts = [
                tensors[expert][f"{kind}{expert}"].chunk(layout.moe_tp)[rank % layout.moe_tp] for kind in "gu"
            ]
            assert torch.equal(local[number], torch.cat(parts))


@settings(max_examples=200, deadline=None)
@given(
    name=st.sampled_from(sorted(ENTRIES)),
    parts=st.sampled_from([1, 2, 4, 8]),
    tp=st.sampled_from([1, 2, 4, 8]),
)
def test_moves_carry_every_element_from_megatrons_shards_to_the_engines(name, parts, tp):
    entry, layout = ENTRIES[name], EngineLayout(tp)
    shards, tensors = megatron_shards(entry, parts), hf_tensors(entry)
    senders = 1 if entry.axis is None else parts
    for rank in range(tp):
        expected = filled(entry.engine_shape(layout), entry.engine_pieces(layout, rank), tensors)
        arrived = torch.zeros_like(expected)
        for sender in range(senders):
            for move in moves(entry.megatron_pieces(parts, sender), entry.engine_pieces(layout, rank)):
                assert not move.target(arrived).any(), "an element came twice"
                move.target(arrived).copy_(move.source(shards[sender]))
        assert torch.equal(arrived, expected)


def test_pieces_without_anything_in_common_make_no_move():
    assert (
        moves([Piece("a", (0,), (4,), (0,))], [Piece("a", (4,), (4,), (0,)), Piece("b", (0,), (4,), (0,))])
        == []
    )
