"""Parcels: their size, and what their digests notice."""

import dataclasses
import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from grpo_megatron.model.entries import EngineLayout
from grpo_megatron.model.parallel_sizes import ParallelSizes
from grpo_megatron.weights.sync.parcels import make_parcels, odd_factors, parcels_in_order
from grpo_megatron.weights.sync.plan import Layouts, ReshardPlan
from tests.unit.sync_cluster import DENSE, EXPERTS, hf_tensors, trainer_parameters

CPU = torch.device("cpu")


def plan_of(arch) -> ReshardPlan:
    sizes = ParallelSizes(tp=2, pp=2) if arch is DENSE else ParallelSizes(dp=2, ep=2)
    return ReshardPlan(Layouts(arch, sizes, EngineLayout(2), 1, multicast=False))


def parcels_of(plan: ReshardPlan, dtype: torch.dtype, max_bytes: int):
    dtypes = dict.fromkeys(plan.engine_shapes, dtype)
    for link, parts in plan.outgoing(0).items():
        yield from make_parcels(link, parts, dtypes, max_bytes)


@given(
    st.sampled_from([DENSE, EXPERTS]),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float8_e4m3fn]),
    st.integers(1, 3000),
)
def test_no_parcel_is_larger_than_a_bucket_unless_a_single_row_is(arch, dtype, max_bytes):
    for parcel in parcels_of(plan_of(arch), dtype, max_bytes):
        if parcel.data_bytes > max_bytes:
            [part] = parcel.parts
            assert part.move.shape[0] == 1 or part.move.numel * dtype.itemsize <= 16


def packed_parcel():
    """Return a parcel with parts of several tensors, and a buffer with it, filled with a rank's
    parameters.
    """
    plan = plan_of(DENSE)
    parcel = max(parcels_of(plan, torch.float32, 2000), key=lambda one: len(one.tensor_spans))
    buffer = torch.zeros(parcel.total_bytes, dtype=torch.uint8)
    parcel.pack(trainer_parameters(plan, hf_tensors(DENSE))[0], buffer)
    return parcel, buffer


def test_the_digest_of_a_tensor_notices_two_words_in_each_others_place():
    """A sum of the words would not notice it: a fault in a plan leaves rows in the wrong order."""
    parcel, buffer = packed_parcel()
    factors = odd_factors([parcel], CPU)
    before = parcel.digests(buffer, factors)
    assert len(parcel.tensor_spans) > 1
    words = buffer[: parcel.data_bytes].view(torch.int64)
    for run, (_, start, end) in enumerate(parcel.tensor_spans):
        for one, other in itertools.islice(itertools.combinations(range(start, end), 2), 50):
            if words[one] == words[other]:
                continue
            words[[one, other]] = words[[other, one]]
            changed = parcel.digests(buffer, factors) != before
            words[[one, other]] = words[[other, one]]
            assert changed.nonzero().flatten().tolist() == [run]


def test_the_digest_of_a_tensor_notices_each_single_bit():
    parcel, buffer = packed_parcel()
    factors = odd_factors([parcel], CPU)
    before = parcel.digests(buffer, factors)
    for run, (_, start, end) in enumerate(parcel.tensor_spans):
        for place, bit in itertools.product((8 * start, 8 * end - 1), range(8)):
            buffer[place] ^= 1 << bit
            assert (parcel.digests(buffer, factors) != before).nonzero().flatten().tolist() == [run]
            buffer[place] ^= 1 << bit


def test_equal_tensors_at_different_places_of_a_parcel_have_different_digests():
    """Otherwise two layers whose weights are swapped would have the right sum on the link."""
    parcel, buffer = packed_parcel()
    buffer[: parcel.data_bytes] = 1
    digests = parcel.digests(buffer, odd_factors([parcel], CPU)).tolist()
    assert len(set(digests)) == len(digests)


@pytest.mark.parametrize("max_bytes", [64, 700, 10**6])
def test_parts_of_parcels_cover_what_a_rank_sends_exactly_once(max_bytes):
    plan = plan_of(DENSE)
    sent = sum(part.move.numel for parts in plan.outgoing(0).values() for part in parts)
    parcels = list(parcels_of(plan, torch.float32, max_bytes))
    assert sum(part.move.numel for parcel in parcels for part in parcel.parts) == sent
    for link, of_link in itertools.groupby(parcels, key=lambda parcel: parcel.link):
        assert [parcel.index for parcel in of_link] == list(
            range(sum(parcel.link == link for parcel in parcels))
        )
    assert all(dataclasses.astuple(parcel)[4][0] == 0 for parcel in parcels)


@pytest.mark.parametrize(("arch", "multicast"), [(DENSE, False), (DENSE, True), (EXPERTS, False)])
def test_everybodys_order_of_parcels_is_part_of_one_order(arch, multicast):
    """Otherwise a sender waits for a receiver that waits for another sender, which waits for the first
    one.
    """
    sizes = ParallelSizes(tp=2, dp=2) if arch is DENSE else ParallelSizes(dp=2, ep=2)
    plan = ReshardPlan(Layouts(arch, sizes, EngineLayout(2), 3, multicast=multicast))
    dtypes = dict.fromkeys(plan.engine_shapes, torch.bfloat16)

    def names(links) -> list[tuple[str, int]]:
        return [(parcel.link.name, parcel.index) for parcel in parcels_in_order(plan, links, dtypes, 2000)]

    ranks = range(4 if arch is DENSE else 2)
    everything = {link: parts for rank in ranks for link, parts in plan.outgoing(rank).items()}
    whole = names(everything)
    assert len(set(whole)) == len(whole)
    place = {name: i for i, name in enumerate(whole)}
    own_orders = [names(plan.outgoing(rank)) for rank in ranks] + [
        names(plan.incoming(one)) for one in plan.engine_ranks
    ]
    for own in own_orders:
        assert own == sorted(own, key=place.__getitem__)
        assert [number for _, number in own] == sorted(number for _, number in own)
    if not multicast:
        first = [link for name, number in whole if number == 0 for link in everything if link.name == name][
            : len(ranks)
        ]
        assert {link.sender for link in first} == set(ranks)  # All senders begin at once,
        assert len({link.receivers for link in first}) == len(ranks)  # each with a receiver of its own.
