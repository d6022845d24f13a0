"""Token streams: the sequences of a micro-batch, one after the other, as a model reads them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np


@dataclass(kw_only=True)
class TokenStream:
    """A stream of T tokens in S sequences, as NumPy arrays on the CPU.

    This is all that a reward model or a probe reads. Subclasses add arrays that a loss needs, such as the
    weight of each token. Subclasses store a value of a token at the position that predicts the token:
    position t predicts `target[t] = tokens[t + 1]`. So no later code has to shift arrays.
    """

    cu_seqlens: np.ndarray
    """int32 [S+1]. Start of each sequence in the stream, and the end of the last one."""
    tokens: np.ndarray
    """int32 [T]. Token ids."""
    routing: np.ndarray | None = None
    """int [T, L, k]. The k experts that the engine chose for each token in each of L layers. These are all
    layers with experts, or those of this rank's pipeline stage. None: not recorded."""

    @classmethod
    def of(cls, sequences: Sequence[np.ndarray], **others: Any) -> Self:
        """Return a stream of token sequences.

        sequences: token ids of each sequence, int [n] with n >= 1.
        others: the other fields of the class.
        Raises ValueError if there is no sequence.
        """
        if not sequences:
            raise ValueError("a stream needs at least one sequence")
        ends = np.cumsum([len(ids) for ids in sequences])
        cu_seqlens = np.append(0, ends).astype(np.int32)
        return cls(cu_seqlens=cu_seqlens, tokens=np.concatenate(sequences).astype(np.int32), **others)

    @property
    def target(self) -> np.ndarray:
        """Token id that each position predicts, int32 [T]. The last position of a sequence has 0."""
        target = np.append(self.tokens[1:], np.int32(0))
        target[self.cu_seqlens[1:] - 1] = 0
        return target

    @property
    def num_sequences(self) -> int:
        return len(self.cu_seqlens) - 1

    @property
    def num_tokens(self) -> int:
        return int(self.cu_seqlens[-1])

    @property
    def lengths(self) -> np.ndarray:
        """Number of tokens of each of the S sequences, int64 [S]."""
        return np.diff(self.cu_seqlens).astype(np.int64)

    @property
    def sequence_id(self) -> np.ndarray:
        """Index of the sequence that each of the T tokens belongs to, int64 [T]."""
        return np.repeat(np.arange(self.num_sequences), self.lengths)
