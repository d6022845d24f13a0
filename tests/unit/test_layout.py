from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from grpo_megatron.batch.layout import Layout

lengths = st.lists(st.integers(1, 30), min_size=1, max_size=8)
layouts = st.builds(
    Layout,
    tp=st.sampled_from([1, 2, 4]),
    cp=st.sampled_from([1, 2, 3]),
    sequence_parallel=st.booleans(),
    alignment=st.sampled_from([1, 8, 16]),
)


def ranks_of(layout, lengths):
    return [replace(layout, cp_rank=rank).pack(lengths) for rank in range(layout.cp)]


@given(lengths, layouts)
def test_every_token_is_on_exactly_one_context_rank(lengths, layout):
    packs = ranks_of(layout, lengths)
    indices = np.concatenate([pack.index for pack in packs])
    assert sorted(indices[indices >= 0]) == list(range(sum(lengths)))


@given(lengths, layouts)
def test_paddings(lengths, layout):
    packs = ranks_of(layout, lengths)
    assert all((pack.padded_lengths % layout.sequence_multiple == 0).all() for pack in packs)
    total = int(packs[0].padded_lengths.sum())
    assert total % layout.pack_multiple == 0
    assert total < sum(lengths) + layout.sequence_multiple * len(lengths) + layout.pack_multiple
    local = {len(pack.index) for pack in packs}
    assert local == {total // layout.cp}
    if layout.sequence_parallel:
        assert local.pop() % layout.tp == 0


@given(lengths, layouts)
def test_gathering_the_scattered_parts_restores_the_stream(lengths, layout):
    stream = np.arange(1, sum(lengths) + 1, dtype=np.float32)
    packs = ranks_of(layout, lengths)
    # What gather's all-reduce over CP adds up, without a process group.
    parts = []
    for pack in packs:
        local = pack.scatter(stream, fill=-5)
        assert (local[pack.index < 0] == -5).all()
        restored = torch.zeros(len(stream))
        restored[pack.index[pack.index >= 0]] = local[pack.index >= 0]
        parts.append(restored)
    assert torch.equal(sum(parts), torch.from_numpy(stream))


@given(lengths, layouts)
def test_gathered_index_puts_the_ranks_parts_in_the_order_of_the_stream(lengths, layout):
    packs = ranks_of(layout, lengths)
    parts = np.concatenate([np.stack([pack.sequence_id, pack.position_ids], axis=1) for pack in packs])
    for pack in packs:
        in_order = parts[pack.gathered_index]
        assert in_order[:, 0].tolist() == np.repeat(np.arange(len(lengths)), pack.padded_lengths).tolist()
        assert in_order[:, 1].tolist() == np.concatenate([np.arange(n) for n in pack.padded_lengths]).tolist()
        assert np.array_equal(in_order[pack.gathered_place], parts)


def test_zigzag_of_two_ranks():
    # 8 tokens in 4 chunks: rank 0 holds chunks 0 and 3, rank 1 chunks 1 and 2
    first, second = (Layout(cp=2, cp_rank=rank).pack([8]) for rank in range(2))
    assert first.position_ids.tolist() == [0, 1, 6, 7]
    assert second.position_ids.tolist() == [2, 3, 4, 5]


def test_positions_restart_in_each_sequence():
    pack = Layout().pack([3, 2])
    assert pack.position_ids.tolist() == [0, 1, 2, 0, 1]
    assert pack.cu_seqlens.tolist() == [0, 3, 5]


def test_pack_padding_goes_to_the_last_sequence():
    pack = Layout(tp=4, sequence_parallel=True).pack([3, 2])
    assert pack.padded_lengths.tolist() == [3, 5]
    assert pack.index.tolist() == [0, 1, 2, 3, 4, -1, -1, -1]


@given(lengths, layouts, st.integers(0, 500))
def test_constant_length(lengths, layout, more):
    least = int(layout.pack(lengths).padded_lengths.sum())
    total = -(-(least + more) // layout.pack_multiple) * layout.pack_multiple
    packs = ranks_of(replace(layout, pack_tokens=total), lengths)
    assert {len(pack.index) for pack in packs} == {total // layout.cp}
    indices = np.concatenate([pack.index for pack in packs])
    assert sorted(indices[indices >= 0]) == list(range(sum(lengths)))
    assert packs[0].padded_lengths.max() <= max(lengths) + layout.sequence_multiple
    assert packs[0].num_tokens == sum(lengths)


def test_constant_length_too_short_is_refused():
    with pytest.raises(ValueError, match="pack_tokens=4"):
        Layout(pack_tokens=4).pack([3, 2])


def test_gather_and_sequence_sum_on_one_rank():
    pack = Layout(tp=4, sequence_parallel=True).pack([3, 2])
    local = pack.scatter(np.array([1, 2, 3, 4, 5], np.float32), fill=np.nan)
    assert pack.gather(local).tolist() == [1, 2, 3, 4, 5]
    assert pack.sequence_sum(local).tolist() == [6, 9]


@pytest.mark.parametrize("lengths", [[], [3, 0]])
def test_empty_packs_and_sequences_are_refused(lengths):
    with pytest.raises(ValueError, match="at least one token"):
        Layout().pack(lengths)


@given(lengths, layouts, st.integers(0, 2**31 - 1))
def test_local_positions_are_those_of_the_scattered_mask(lengths, layout, seed):
    for pack in ranks_of(layout, lengths):
        mask = np.random.default_rng(seed).random(pack.num_tokens) < 0.4
        assert pack.local_positions(mask).tolist() == pack.scatter(mask).nonzero()[:, 0].tolist()


def test_a_stream_of_another_length_is_refused():
    with pytest.raises(ValueError, match="4 tokens, but the pack has 5"):
        Layout().pack([3, 2]).scatter(np.zeros(4))
