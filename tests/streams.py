"""Parts of token streams, for tests that compare passes over micro-batches with the whole batch."""

from collections.abc import Sequence
from dataclasses import fields

import numpy as np

from grpo_megatron.batch.pairs import PairBatch
from grpo_megatron.batch.token_stream import TokenStream


def token_index(stream: TokenStream, sequences: Sequence[int]) -> np.ndarray:
    """Return the indices in the stream of all tokens of some sequences, in their order, int64 [n]."""
    ends = stream.cu_seqlens
    return np.concatenate([np.arange(ends[i], ends[i + 1]) for i in sequences])


def selected(stream: TokenStream, sequences: Sequence[int]) -> TokenStream:
    """Return a stream of the same kind with only some of the sequences, in the order given.

    The sequences of a PairBatch must be whole pairs.
    """
    rows = np.asarray(sequences, dtype=np.int64)
    index = {stream.num_tokens: token_index(stream, rows), stream.num_sequences: rows}
    if isinstance(stream, PairBatch):
        index[stream.num_sequences // 2] = rows[::2] // 2
    given = {spec.name: getattr(stream, spec.name) for spec in fields(stream)}
    chosen = {
        name: array if array is None else array[index[len(array)]]
        for name, array in given.items()
        if name != "cu_seqlens"
    }
    lengths = stream.lengths[rows]
    return type(stream)(cu_seqlens=np.append(0, np.cumsum(lengths)).astype(np.int32), **chosen)
