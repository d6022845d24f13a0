"""Description of a pack of sequences, as attention layers and gated delta networks need it.

All layers of a model share one description per micro-batch.
"""

from dataclasses import dataclass, field, replace

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams

from grpo_megatron.batch.layout import Pack, on_device
from grpo_megatron.megatron.layers.delta_rule import Chunks


@dataclass(frozen=True)
class AttentionBatch:
    """Sizes of one attention kernel call, which computes n sequences, or sections of them, together."""

    n: int
    """Number of sequences or sections. All have the same size."""
    q: int
    """Number of queries per sequence or section. They are consecutive tokens."""
    k: int
    """Number of keys per sequence or section. The queries are at the last q of the k positions."""
    part: int
    """Index of the key tensor whose n * k rows from `first` on are the keys. The pack's keys are split into
    several such tensors (PackedSequences.key_sizes)."""
    first: int = 0
    """Row of the first key within this tensor. It is not 0 only behind a sliding window."""


@dataclass
class PackedSequences(PackedSeqParams):
    """Description of a pack (sequences concatenated along the token axis) that all layers use.

    It adds to Megatron's PackedSeqParams the batches in which this project's PackedAttention computes
    attention, and the chunks of gated delta networks. Fields that reorder rows are None if the order does not
    change.
    """

    position_ids: torch.Tensor | None = None
    """int64 [t]: position of each token in its sequence."""
    batches: tuple[AttentionBatch, ...] = ()
    """Batches of queries, in the order in which they are computed."""
    query_rows: torch.Tensor | None = None
    """int64: for each query of the concatenated batches, its row in this rank's part of the pack.

    Sequences shorter than the longest sequence of their batch repeat their last row.
    """
    key_rows: torch.Tensor | None = None
    """int64: order of the keys, gathered from all CP ranks, before they are split into parts."""
    key_sizes: tuple[int, ...] = ()
    """Number of keys in each tensor into which the keys are split (see AttentionBatch.part)."""
    inverse: torch.Tensor | None = None
    """int64 [t]: for each token of the pack, its row in the batches' concatenated outputs."""
    short: bool = False
    """True if all sequences are so short that batched matrix products replace torch's flash kernel."""
    lengths: np.ndarray | None = None
    """int64 [S]: number of tokens of each sequence, including padding, over all CP ranks."""
    pack: Pack | None = None
    """The mapping of tokens that this describes; None if TransformerEngine computes attention."""
    window: int | None = None
    """Sliding window of the batches: a token sees itself and the window - 1 tokens before it. None: the whole
    sequence before it."""
    _kept: dict = field(default_factory=dict, repr=False)
    """Cached rotations, masks, chunks and descriptions for windows, which are the same in every layer."""

    def rotation(
        self, frequencies: torch.Tensor, dtype: torch.dtype, factor: float = 1.0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (cos, sin), both [t, 1, d], with which `rotate` rotates the pack's queries and keys.

        The result is cached for all layers with the same frequencies, factor and dtype.

        frequencies: [d / 2] on the host, angle per position of each channel pair, in radians.
        dtype: dtype of the result.
        factor: number that cos and sin are multiplied by.
        """
        key = (dtype, factor, *frequencies.tolist())
        if key not in self._kept:
            angle = self.position_ids.to(frequencies.dtype)[:, None] * frequencies.to(
                self.position_ids.device
            )
            cos, sin = angle.cos() * factor, angle.sin() * factor
            self._kept[key] = tuple(
                torch.cat(halves, dim=-1)[:, None].to(dtype) for halves in ((cos, cos), (-sin, sin))
            )
        return self._kept[key]

    def mask(self, batch: AttentionBatch, dtype: torch.dtype) -> torch.Tensor:
        """Return the mask [q, k] to add to the batch's attention scores: -inf on hidden keys, else 0.

        Hidden are later keys, and keys before the sliding window. The mask is cached, so all layers save the
        same tensor for the backward pass.
        """
        key = (batch.q, batch.k, dtype)
        if key not in self._kept:
            hidden = torch.full((batch.q, batch.k), -torch.inf, dtype=dtype, device=self.position_ids.device)
            self._kept[key] = hidden.triu(batch.k - batch.q + 1)
            if self.window:
                self._kept[key] += hidden.tril_(batch.k - batch.q - self.window)
        return self._kept[key]

    def within(self, window: int) -> "PackedSequences":
        """Return the description of this pack for attention with a sliding window.

        The result is cached. It is this description itself if no sequence is longer than the window.

        window: number of tokens that a token sees, including itself.
        """
        if window >= self.max_seqlen_q:
            return self
        if ("window", window) not in self._kept:
            plan = {"query_rows": None, "inverse": None, "short": False, "_kept": {}}
            plan |= _sequence_sections(self.pack, self.position_ids.device, window)
            self._kept["window", window] = replace(self, window=window, **plan)
        return self._kept["window", window]

    def chunks(self) -> Chunks:
        """Return the division of the whole sequences into chunks, for gated delta networks.

        It counts the tokens of all CP ranks, in the order of the padded stream.
        """
        if Chunks not in self._kept:
            self._kept[Chunks] = Chunks.of(self.lengths, self.position_ids.device)
        return self._kept[Chunks]


# Least length of a sequence in a batch, as a share of the longest one. A smaller share would waste attention
# FLOPs on padding; a larger one would make many small kernels.
_BATCH_RANGE = 0.8
# On a CPU, packs whose sequences have at most this many tokens are computed by batched matrix products,
# because torch's flash kernel makes a small product for each head of each sequence.
_SHORT = 128
# The same share for short sequences, where starting a product costs more than padding does.
_SHORT_BATCH_RANGE = 0.5
# Most queries (rows) of a mask. Its columns are the keys of one sequence, so it does not grow with the pack.
_MASKED_QUERIES = 1024


def describe_pack(
    pack: Pack, device: torch.device, own_attention: bool = True, equal_only: bool | None = None
) -> PackedSequences:
    """Return the PackedSequences of a pack, which the attention of all layers uses. Tensors are on `device`.

    own_attention: True if this project's PackedAttention computes attention, False if TransformerEngine does.
    equal_only: if True, only neighbouring sequences of equal length are computed together. This avoids
        padding and reordering, but needs more kernel calls. If False, any sequences of similar length are.
        None: True on a CPU if a sequence has more than 128 tokens. Ignored under CP, or if
        own_attention is False.
    """
    cu_seqlens = on_device(torch.from_numpy(pack.cu_seqlens), device)
    cu_seqlens_padded = on_device(torch.from_numpy(pack.cu_seqlens_padded), device)
    longest = int(pack.padded_lengths.max())
    plan = {}
    if not own_attention:
        # Padding counts as tokens here. The kernel writes no statistics for rows outside of all sequences.
        # Under CP, whatever that memory held (NaN at worst) would spread from the padding to every gradient.
        # This also saves TransformerEngine's comparisons with the real lengths: two synchronisations per
        # layer.
        cu_seqlens, cu_seqlens_padded = cu_seqlens_padded, None
    elif pack.layout.cp > 1:
        plan = _sequence_sections(pack, device)
    else:
        short = device.type == "cpu" and longest <= _SHORT
        if equal_only is None:
            equal_only = device.type == "cpu" and not short
        lengths, share = pack.padded_lengths, _SHORT_BATCH_RANGE if short else _BATCH_RANGE
        groups = _equal_neighbours(lengths) if equal_only else _similar(lengths, share)
        plan = _whole_sequences(pack, device, groups) | {"short": short}
    return PackedSequences(
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        cu_seqlens_q_padded=cu_seqlens_padded,
        cu_seqlens_kv_padded=cu_seqlens_padded,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        position_ids=on_device(torch.from_numpy(pack.position_ids), device),
        lengths=pack.padded_lengths,
        pack=pack if own_attention else None,
        **plan,
    )


def _whole_sequences(pack: Pack, device: torch.device, groups: list[np.ndarray]) -> dict:
    """Return the fields of PackedSequences that divide a pack into batches of whole sequences, without CP.

    groups: for each batch, the indices of its sequences.

    Returns {name of the field: value}.
    """
    lengths, starts = pack.padded_lengths, pack.cu_seqlens_padded[:-1].astype(np.int64)
    batches, rows, real = [], [], []
    for members in groups:
        length = lengths[members][:, None]
        column = np.arange(length.max())
        rows.append((starts[members][:, None] + np.minimum(column, length - 1)).ravel())
        real.append((column < length).ravel())
        batches.append(AttentionBatch(len(members), len(column), len(column), len(batches)))
    rows, real = np.concatenate(rows), np.concatenate(real)
    plan = {"batches": tuple(batches), "key_sizes": tuple(b.n * b.k for b in batches)}
    if not np.array_equal(rows, np.arange(lengths.sum())):
        inverse = np.empty(lengths.sum(), dtype=np.int64)
        inverse[rows[real]] = np.flatnonzero(real)
        plan["query_rows"] = plan["key_rows"] = on_device(torch.from_numpy(rows), device)
        plan["inverse"] = on_device(torch.from_numpy(inverse), device)
    return plan


def _equal_neighbours(lengths: np.ndarray) -> list[np.ndarray]:
    return np.split(np.arange(len(lengths)), np.flatnonzero(lengths[1:] != lengths[:-1]) + 1)


def _similar(lengths: np.ndarray, share: float) -> list[np.ndarray]:
    order = np.argsort(-lengths, kind="stable")
    groups = []
    while len(order):
        fits = lengths[order] >= share * lengths[order[0]]
        groups.append(order[fits])
        order = order[~fits]
    return groups


def _sequence_sections(pack: Pack, device: torch.device, window: int | None = None) -> dict:
    """Return the fields of PackedSequences that divide a pack into sections of sequences.

    This division is used under context parallelism (CP) and for sliding windows. Each batch is a section of
    one sequence: at most 1024 (_MASKED_QUERIES) of this rank's queries, and the keys of all CP ranks up to
    the last of these queries. Keys that a sliding window hides from all of these queries are left out.

    Returns {name of the field: value}.
    """
    batches = []
    firsts, lengths = pack.pieces(pack.layout.cp_rank)
    for sequence in range(len(firsts)):
        for first, length in zip(firsts[sequence].tolist(), lengths[sequence].tolist(), strict=True):
            for start in range(0, length, _MASKED_QUERIES):
                queries = min(_MASKED_QUERIES, length - start)
                hidden = max(0, first + start + 1 - window) if window else 0
                keys = first + start + queries - hidden
                batches.append(AttentionBatch(1, queries, keys, sequence, hidden))
    is_divided = pack.layout.cp > 1
    return {
        "batches": tuple(batches),
        "key_rows": pack.tensor("gathered_index", device) if is_divided else None,
        "key_sizes": tuple(pack.padded_lengths.tolist()),
    }
