"""Sums over the trained tokens of each sequence.

Advantages and weights are computed from these sums and from the columns of `SampleTable`, without reading
single tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class SequenceSums:
    """Sums over the trained tokens of each of S sequences, from which advantages and weights are computed.

    Each field has one sum per sequence, but `columns` has several. Some fields are sums of these values of a
    trained token t:

    - KL_t: estimate at token t of the KL to the reference policy, in nats; 0 if the KL is not subtracted from
      the reward.
    - s_t: sum of KL_u over the trained tokens u >= t of the sequence.
    """

    trained: np.ndarray
    """Number of trained tokens."""
    kept: np.ndarray
    """Number of trained tokens that the correction of the mismatch between engine and trainer keeps."""
    kl: np.ndarray
    """Sum of KL_t."""
    suffix: np.ndarray
    """Sum of s_t."""
    suffix_squared: np.ndarray
    """Sum of s_t²."""
    columns: np.ndarray | None = None
    """float64 [S, C]. Sums of the C columns that the advantage estimator asks for (algorithm/columns.py). The
    constructor turns None into an array with C = 0."""

    def __post_init__(self):
        if self.columns is None:
            object.__setattr__(self, "columns", np.zeros((len(self.trained), 0)))

    @classmethod
    def of(
        cls,
        cu_seqlens: np.ndarray,
        mask: np.ndarray,
        kept: np.ndarray,
        kl: np.ndarray | None = None,
        suffix: np.ndarray | None = None,
        columns: Sequence[np.ndarray] = (),
    ) -> "SequenceSums":
        """Return the sums over each sequence, computed from arrays with one value per token.

        cu_seqlens: int [S+1], start of each sequence in the stream of T tokens, and the stream's end.
        mask: bool [T], True for trained tokens.
        kept: bool [T], False for tokens that the correction of the mismatch between engine and trainer
            rejects.
        kl: float [T], estimate of the KL to the reference policy at each token, in nats. None: all are 0.
        suffix: float64 [T], sum of `kl` over this and all later trained tokens of the sequence. None: it is
            computed from `kl`.
        columns: float [T] each, further values to sum. They become the columns of the field `columns`.
        """

        def summed(values: np.ndarray) -> np.ndarray:
            return np.add.reduceat(np.where(mask, values, 0.0), cu_seqlens[:-1])

        ones = np.ones(len(mask))
        zeros = np.zeros(len(cu_seqlens) - 1)
        further = np.stack([summed(values) for values in columns], axis=1) if columns else None
        if kl is None:
            return cls(summed(ones), summed(kept), zeros, zeros, zeros, further)
        if suffix is None:
            suffix = suffix_sums(cu_seqlens, np.where(mask, kl, 0.0))
        return cls(summed(ones), summed(kept), summed(kl), summed(suffix), summed(suffix**2), further)


def suffix_sums(cu_seqlens: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Return for each token the sum of `values` over this and all later tokens of its sequence, float64 [T].

    cu_seqlens: int [S+1], start of each sequence in the stream of T tokens, and the stream's end.
    values: float [T].
    """
    values = np.asarray(values, dtype=np.float64)
    after = np.append(np.cumsum(values[::-1])[::-1], 0.0)
    ends = np.repeat(after[cu_seqlens[1:]], np.diff(cu_seqlens))
    return after[:-1] - ends
