"""Deltas of parcels, and the bytes of parcels: the receiver gets what the sender packed, bit for bit."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_megatron.model.pieces import Move
from grpo_megatron.weights.sync.delta import Encoder, decode, max_payload
from grpo_megatron.weights.sync.parcels import make_parcels, odd_factors
from grpo_megatron.weights.sync.plan import EngineRank, Link, Part

LINK = Link(0, (EngineRank(0, 0),), 0)
CPU = torch.device("cpu")


def parcel_of(*tensors: tuple[int, torch.dtype]):
    """Return a parcel with a one-dimensional part for each tensor, named by its place."""
    parts = [
        Part(f"megatron{i}", f"engine{i}", Move(f"hf{i}", (0,), (n,), (0,), (0,)))
        for i, (n, _) in enumerate(tensors)
    ]
    (parcel,) = make_parcels(
        LINK, parts, {f"engine{i}": dtype for i, (_, dtype) in enumerate(tensors)}, 10**9
    )
    return parcel


def packed(parcel, parameters, buffer=None) -> torch.Tensor:
    """Return a packed buffer with its digests and spare room, like a sender's, which fits its largest
    parcel.
    """
    buffer = torch.full((max_payload(parcel) + 48,), 0xAB, dtype=torch.uint8) if buffer is None else buffer
    parcel.pack(parameters, buffer)
    parcel.sent_digests(buffer).copy_(parcel.digests(buffer, odd_factors([parcel], CPU)))
    return buffer


def weights(generator: np.random.Generator, tensors) -> dict[str, torch.Tensor]:
    return {
        f"megatron{i}": torch.from_numpy(generator.normal(size=n)).to(dtype)
        for i, (n, dtype) in enumerate(tensors)
    }


def test_parts_of_one_tensor_that_follow_each_other_have_one_digest():
    """Parts are padded to 16 bytes, and a digest works on words of 8 bytes."""
    moves = [Move(name, (0,), (n,), (0,), (0,)) for name, n in (("b", 4), ("a", 3), ("a", 5), ("b", 1))]
    (parcel,) = make_parcels(LINK, [Part("m", "e", move) for move in moves], {"e": torch.float32}, 10**9)
    assert parcel.tensor_spans == [("b", 0, 2), ("a", 2, 8), ("b", 8, 10)]
    assert (parcel.data_bytes, parcel.total_bytes) == (80, 104)


@pytest.mark.parametrize("max_bytes", [16, 30, 48, 10**6])
def test_a_tensor_that_is_cut_by_rows_arrives_where_it_belongs(max_bytes):
    """It is in the middle of the sender's tensor, and in one expert of the receiver's."""
    move = Move("a", (0, 0), (7, 3), (2, 1), (1, 3, 2))
    source, target = torch.arange(60.0).view(12, 5), torch.zeros(2, 11, 6)
    parcels = make_parcels(LINK, [Part("m", "e", move)], {"e": torch.float32}, max_bytes)
    for parcel in parcels:
        buffer = torch.empty(parcel.total_bytes, dtype=torch.uint8)
        parcel.pack({"m": source}, buffer)
        parcel.unpack(buffer, {"e": target})
    expected = torch.zeros(2, 11, 6)
    expected[1, 3:10, 2:5] = source[2:9, 1:4]
    assert target.equal(expected)


dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.float8_e4m3fn])
sizes = st.lists(st.tuples(st.integers(1, 70), dtypes), min_size=1, max_size=4)


@settings(max_examples=60)
@given(sizes, st.integers(0, 10**6), st.integers(0, 255))
def test_packing_again_from_what_was_unpacked_gives_the_same_bytes_whatever_was_in_the_buffers(
    tensors, seed, rubbish
):
    """The digest also covers the bytes between the parts, so that leftovers there would look like wrong
    weights.
    """
    parcel, parameters = parcel_of(*tensors), weights(np.random.default_rng(seed), tensors)
    buffer = packed(parcel, parameters)
    engine = {f"engine{i}": torch.zeros(n, dtype=dtype) for i, (n, dtype) in enumerate(tensors)}
    parcel.unpack(buffer, engine)
    for i in range(len(tensors)):
        assert engine[f"engine{i}"].view(torch.uint8).equal(parameters[f"megatron{i}"].view(torch.uint8))
    again = torch.full((parcel.total_bytes,), rubbish, dtype=torch.uint8)
    parcel.pack_again(engine, again)
    assert again[: parcel.data_bytes].equal(buffer[: parcel.data_bytes])


@settings(max_examples=60)
@given(sizes, st.integers(0, 10**6), st.lists(st.floats(0, 1), min_size=1, max_size=4))
def test_each_delta_is_the_buffer_that_was_packed_and_never_larger(tensors, seed, shares):
    """A receiver that applies delta after delta to its own weights always has what the sender has."""
    generator = np.random.default_rng(seed)
    parcel, parameters = parcel_of(*tensors), weights(generator, tensors)
    engine = {f"engine{i}": torch.zeros(n, dtype=dtype) for i, (n, dtype) in enumerate(tensors)}
    encoder, total, buffer = Encoder(), 0, None
    encoder.begin(full=True)
    for share in (1.0, *shares):
        for name, other in weights(generator, tensors).items():
            changed = torch.from_numpy(generator.random(len(other)) < share)
            parameters[name] = torch.where(changed, other.float(), parameters[name].float()).to(other.dtype)
        buffer = packed(parcel, parameters, buffer)  # a sender packs every sync into the same memory
        expected = buffer[: parcel.total_bytes].clone()
        payload = encoder.encode(parcel, buffer)
        total += len(payload)
        assert len(payload) <= max_payload(parcel)
        found = decode(parcel, payload, engine)
        assert found[: parcel.total_bytes].equal(expected)
        parcel.unpack(found, engine)
    assert encoder.sent_bytes == total


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_a_few_changed_elements_are_a_small_payload_and_many_a_whole_one(dtype):
    tensors = [(40_000, dtype), (40_000, dtype)]
    parcel, parameters = parcel_of(*tensors), weights(np.random.default_rng(0), tensors)
    encoder = Encoder()
    encoder.begin(full=True)
    assert len(encoder.encode(parcel, packed(parcel, parameters))) == max_payload(parcel)
    encoder.begin(full=False)
    nothing = len(encoder.encode(parcel, packed(parcel, parameters)))
    assert nothing < 100
    parameters["megatron1"][::1000] = 3.0
    few = len(encoder.encode(parcel, packed(parcel, parameters)))
    assert few < 600
    assert encoder.sent_bytes == nothing + few
    # Random mantissas do not compress, and the bits that mark changes come on top, so that the whole parcel
    # is smaller.
    all_other = weights(np.random.default_rng(1), tensors)
    bits = torch.from_numpy(np.random.default_rng(2).integers(0, 256, 40_000 * dtype.itemsize, np.uint8))
    all_other["megatron0"] = bits.view(dtype)
    all_other["megatron1"] = bits.flip(0).view(dtype)
    assert len(encoder.encode(parcel, packed(parcel, all_other))) == max_payload(parcel)
    encoder.begin(full=True)
    assert encoder.sent_bytes == 0
    assert len(encoder.encode(parcel, packed(parcel, all_other))) == max_payload(parcel)
