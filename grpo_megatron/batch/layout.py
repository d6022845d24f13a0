"""The layout of token streams: all index arithmetic between a flat token stream and what a rank computes.

A micro-batch is a stream of T tokens, with its sequences one after the other (``cu_seqlens``). A rank sees
this stream with padding inserted. Under context parallelism (CP), a rank sees only its share of the stream.
``Layout.pack`` computes the mapping once and returns it as a ``Pack``. Model input, log-probs, loss and
metrics all go through this ``Pack``. No other code computes token positions from a rank.
"""

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch


def padded_to(lengths, multiple: int):
    """Return `lengths`, an integer or an array of integers, rounded up to multiples of `multiple`."""
    return -(-lengths // multiple) * multiple


def on_device(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a CPU tensor to `device` without making the CPU wait for the copy.

    If `device` is a CPU, the result shares its memory with `values`.
    """
    if device.type == "cuda":
        values = values.pin_memory()
    return values.to(device, non_blocking=True)


@dataclass(frozen=True)
class Layout:
    """Parallel sizes and padding rules that decide which tokens of a micro-batch one rank computes."""

    tp: int = 1
    """Size of the tensor-parallel (TP) group."""
    cp: int = 1
    """Size of the context-parallel (CP) group."""
    cp_rank: int = 0
    """This rank's index in its CP group."""
    sequence_parallel: bool = False
    """True if activations are split over the TP ranks between matrix products. The number of tokens of a
    padded micro-batch must then be divisible by tp."""
    alignment: int = 1
    """Number that the FP8 kernels require every GEMM dimension to be divisible by. 1: no requirement."""
    pack_tokens: int = 0
    """Number of tokens, over all CP ranks, to which every micro-batch is padded, because pipeline stages need
    equal sizes. 0: micro-batches may differ in size."""

    @property
    def sequence_multiple(self) -> int:
        """Number by which the padded length of every sequence must be divisible.

        The number is 2 · cp under context parallelism, because each CP rank takes two chunks of a sequence
        (zig-zag). Otherwise it is 1.
        """
        return 2 * self.cp if self.cp > 1 else 1

    @property
    def pack_multiple(self) -> int:
        """Number by which the token count of a padded micro-batch, over all CP ranks, must be divisible."""
        split = self.cp * (self.tp if self.sequence_parallel else 1)
        return math.lcm(self.sequence_multiple, split, split * self.alignment)

    def pack(self, lengths) -> "Pack":
        """Return the index mapping between a micro-batch's token stream and this rank's share of it.

        lengths: number of tokens of each sequence, in stream order, each at least 1.

        Raises ValueError if there is no sequence, or if a length is below 1. If micro-batches have a fixed
        size (pack_tokens), also raises ValueError if the padded sequences have more tokens, or if the size is
        not a multiple of pack_multiple.
        """
        lengths = np.asarray(lengths, dtype=np.int64)
        if lengths.ndim != 1 or lengths.size == 0 or lengths.min() < 1:
            raise ValueError(
                f"a pack needs one or more sequences of at least one token, got lengths {lengths}"
            )
        padded = padded_to(lengths, self.sequence_multiple)
        if self.pack_tokens:
            empty = self._empty_sequences(padded)
            return Pack(self, np.append(lengths, np.zeros_like(empty)), np.append(padded, empty))
        # The last sequence takes the padding of the pack, because kernels and Megatron's RoPE require
        # cu_seqlens to cover every position.
        padded[-1] += -int(padded.sum()) % self.pack_multiple
        return Pack(self, lengths, padded)

    def tensor_parallel_share(self, tensor: torch.Tensor, tp_rank: int) -> torch.Tensor:
        """Return the rows of a per-token tensor that a TP rank holds between matrix products.

        Under sequence parallelism the result is [t / tp, ...], the rank's chunk of the rows. Otherwise all
        rows are returned.

        tensor: [t, ...], one row for each token of the CP rank.
        """
        return tensor.chunk(self.tp)[tp_rank] if self.sequence_parallel else tensor

    def _empty_sequences(self, padded: np.ndarray) -> np.ndarray:
        """Return the lengths of the padding-only sequences that fill a micro-batch, int64 [n].

        With these sequences, the micro-batch has pack_tokens tokens, the fixed size of all micro-batches.

        No padding-only sequence is longer than the longest real one, because attention over one long stretch
        of padding would be expensive.

        padded: int64 [S], padded lengths of the S real sequences.

        Raises ValueError if the real sequences have more than pack_tokens tokens with their padding, or if
        pack_tokens is not a multiple of pack_multiple.
        """
        rest = self.pack_tokens - int(padded.sum())
        if rest < 0 or self.pack_tokens % self.pack_multiple:
            raise ValueError(
                f"cannot pad a micro-batch of {padded.sum()} tokens to pack_tokens={self.pack_tokens}, which "
                f"must be at least as large and a multiple of {self.pack_multiple}"
            )
        longest = int(padded.max())
        sizes = [longest] * (rest // longest) + [rest % longest] * (rest % longest > 0)
        return np.array(sizes, dtype=np.int64)


def _cumulative(lengths: np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)


@dataclass(frozen=True)
class Pack:
    """The mapping between the token stream of a micro-batch and one rank's padded share of it.

    The stream has T = sum(lengths) tokens in S sequences. The rank's share has t tokens, including padding.
    If micro-batches are padded to a fixed size (Layout.pack_tokens), sequences at the end may consist only of
    padding (length 0).

    layout: parallel sizes and padding rules.
    lengths: int64 [S], number of tokens of each sequence, without padding.
    padded_lengths: int64 [S], number of tokens of each sequence with padding, over all CP ranks.
    """

    layout: Layout
    lengths: np.ndarray
    padded_lengths: np.ndarray

    @cached_property
    def cu_seqlens(self) -> np.ndarray:
        """Start of each of the S sequences in the unpadded stream, and the stream's end, int32 [S+1]."""
        return _cumulative(self.lengths)

    @cached_property
    def cu_seqlens_padded(self) -> np.ndarray:
        """Start of each of the S sequences in the padded stream, and the stream's end, int32 [S+1].

        The padded stream has the tokens of all CP ranks.
        """
        return _cumulative(self.padded_lengths)

    def pieces(self, cp_rank: int) -> tuple[np.ndarray, np.ndarray]:
        """Return (first, length) of each contiguous piece of the sequences that a CP rank computes.

        - first: int64 [S, p], position of the piece's first token within its padded sequence.
        - length: int64 [S, p], number of tokens of the piece.

        Each of the S sequences has p pieces on a CP rank. Without CP, a sequence is one piece (p = 1). With
        CP, the sequence is cut into 2·cp chunks, and rank r gets the chunks r and 2·cp-1-r (p = 2, zig-zag),
        so that causal attention costs the same on all ranks.
        """
        cp = self.layout.cp
        if cp == 1:
            return np.zeros((len(self.lengths), 1), dtype=np.int64), self.padded_lengths[:, None]
        chunk = self.padded_lengths[:, None] // (2 * cp)
        return chunk * np.array([[cp_rank, 2 * cp - 1 - cp_rank]]), np.repeat(chunk, 2, axis=1)

    def _positions(self, cp_rank: int) -> np.ndarray:
        """Return the positions of a CP rank's t tokens, each in the token's padded sequence, int64 [t]."""
        first, length = (x.ravel() for x in self.pieces(cp_rank))
        ends = np.cumsum(length)
        return np.arange(ends[-1]) + np.repeat(first - (ends - length), length)

    @cached_property
    def position_ids(self) -> np.ndarray:
        """Positions of this rank's t tokens, each counted from the start of the token's sequence, int64 [t].

        Padding after a sequence continues the count.
        """
        return self._positions(self.layout.cp_rank)

    @cached_property
    def gathered_place(self) -> np.ndarray:
        """Index in the padded stream of each row that is all-gathered from the CP ranks, int64 [t · cp].

        An all-gather concatenates the t rows of rank 0, rank 1, and so on. stream[gathered_place] has the
        rows of the padded stream in this order.
        """
        starts = self.cu_seqlens_padded[:-1].astype(np.int64)[self.sequence_id]
        return np.concatenate([starts + self._positions(rank) for rank in range(self.layout.cp)])

    @cached_property
    def gathered_index(self) -> np.ndarray:
        """Index that sorts rows all-gathered from the CP ranks into sequence order, int64 [t · cp].

        gathered[gathered_index] has the rows in the order of the padded stream. It is the inverse of
        `gathered_place`. Attention applies the index to gathered keys and values.
        """
        index = np.empty(len(self.gathered_place), dtype=np.int64)
        index[self.gathered_place] = np.arange(len(index))
        return index

    @cached_property
    def sequence_id(self) -> np.ndarray:
        """Index of the sequence that each of this rank's t tokens belongs to, int64 [t].

        Padding belongs to the sequence that it follows.
        """
        return np.repeat(np.arange(len(self.lengths)), self.padded_lengths // self.layout.cp)

    @cached_property
    def index(self) -> np.ndarray:
        """Index of each of this rank's t tokens in the micro-batch's stream, int64 [t]; -1 for padding."""
        sequence, position = self.sequence_id, self.position_ids
        return np.where(position < self.lengths[sequence], self.cu_seqlens[sequence] + position, -1)

    @property
    def num_sequences(self) -> int:
        """Number of sequences with at least one real token."""
        return int(np.count_nonzero(self.lengths))

    def last_tokens(self, tp_rank: int) -> tuple[np.ndarray, np.ndarray]:
        """Return (row, sequence) for each of the n sequences whose last token is on this rank.

        A reward model's score head reads the hidden states of these n tokens.

        - row: int64 [n], row of the sequence's last token in this rank's activations.
        - sequence: int64 [n], index of the sequence.

        tp_rank: this rank's index in the TP group. It matters only under sequence parallelism, where each TP
            rank has only a part of the rows.
        """
        is_last = self.position_ids == self.lengths[self.sequence_id] - 1
        share = self.layout.tensor_parallel_share(
            torch.from_numpy(np.where(is_last, self.sequence_id, -1)), tp_rank
        ).numpy()
        rows = np.flatnonzero(share >= 0)
        return rows, share[rows]

    def sum_over_context(self, values: torch.Tensor, cp_group=None) -> torch.Tensor:
        """Return the sums over the CP ranks of one value per sequence, [S], detached.

        All CP ranks must call this method.

        values: [S], this rank's value for each of the S sequences.
        cp_group: the CP process group, needed if there are several CP ranks.
        """
        return _sum_over(values.detach().clone(), cp_group, self.layout.cp)

    @cached_property
    def place(self) -> np.ndarray:
        """Index of each of this rank's t tokens in the micro-batch's stream of T tokens, int64 [t].

        Padding has the index T, which is one more than the last token's index. `gather` writes all values to
        these indices of an array [T + 1], and drops the last element with the padding.
        """
        return np.where(self.index < 0, self.num_tokens, self.index)

    @cached_property
    def sequence_or_none(self) -> np.ndarray:
        """Index of the sequence that each of this rank's t tokens belongs to, int64 [t]; S for padding.

        S is the number of sequences, so no sequence has this index. `sequence_sum` uses it to leave out
        padding.
        """
        return np.where(self.index < 0, len(self.lengths), self.sequence_id)

    @cached_property
    def _on_device(self) -> dict[tuple[str, torch.device], torch.Tensor]:
        return {}

    def tensor(self, name: str, device: torch.device) -> torch.Tensor:
        """Return this pack's array attribute `name`, such as "index", as a tensor on `device`.

        The tensor is cached, so later calls copy nothing.
        """
        if (name, device) not in self._on_device:
            self._on_device[name, device] = on_device(torch.from_numpy(getattr(self, name)), device)
        return self._on_device[name, device]

    @property
    def num_tokens(self) -> int:
        """Number of tokens of the whole micro-batch, without padding."""
        return int(self.cu_seqlens[-1])

    def _local(self, stream: np.ndarray, fill) -> np.ndarray:
        """Return this rank's part of a per-token array: [t, ...] for its t tokens, including padding.

        stream: [T, ...], one entry for each of the micro-batch's T tokens.
        fill: value for padding.
        """
        if len(stream) != self.num_tokens:
            raise ValueError(f"the stream has {len(stream)} tokens, but the pack has {self.num_tokens}")
        local = np.asarray(stream)[self.index]  # T >= 1, so index -1 reads a valid element
        local[self.index < 0] = fill
        return local

    def scatter(self, stream: np.ndarray, fill=0) -> torch.Tensor:
        """Return this rank's part of a per-token array as a CPU tensor of the same dtype.

        The result is [t, ...] for this rank's t tokens, including padding.

        stream: [T, ...], one entry for each of the micro-batch's T tokens.
        fill: value for padding.
        """
        return torch.from_numpy(self._local(stream, fill))

    def local_positions(self, mask: np.ndarray) -> torch.Tensor:
        """Return the indices of this rank's tokens whose mask is True, int64 [n], as a CPU tensor.

        The indices count this rank's t tokens, including padding. The mask of padding is False.

        mask: bool [T], one entry for each of the micro-batch's T tokens.
        """
        return torch.from_numpy(np.flatnonzero(self._local(mask, False)))

    def gather(self, local: torch.Tensor, cp_group=None) -> torch.Tensor:
        """Return the values of all T tokens of the micro-batch, [T], collected from all CP ranks.

        This is the inverse of `scatter`. All CP ranks must call this method, and all get the same result.

        local: [t], the values of this rank's t tokens. Values at padding are dropped.
        cp_group: the CP process group, needed if there are several CP ranks.
        """
        # Padding is written after the end of the stream. To remove it with a mask, the host would have to
        # wait until the device has counted.
        stream = local.new_zeros(self.num_tokens + 1).index_copy(0, self.tensor("place", local.device), local)
        return _sum_over(stream[:-1], cp_group, self.layout.cp)

    def sequence_sum(self, local: torch.Tensor, cp_group=None) -> torch.Tensor:
        """Return the sum of `local` over each of the S sequences, without padding, over all CP ranks: [S].

        All CP ranks must call this method. The result has no gradient, because gradients would have to pass
        through a collective. A loss with a ratio per sequence gets its gradient by adding
        logp - logp.detach(), which has the value 0 and the gradient of each token's own log-prob.

        local: [t], one value for each of this rank's t tokens.
        cp_group: the CP process group, needed if there are several CP ranks.
        """
        sums = local.new_zeros(len(self.lengths) + 1)
        sums.index_add_(0, self.tensor("sequence_or_none", local.device), local.detach())
        return _sum_over(sums[:-1], cp_group, self.layout.cp)


def _sum_over(tensor: torch.Tensor, cp_group, cp: int) -> torch.Tensor:
    """Sum `tensor` over the `cp` ranks of a context-parallel group, in place. Return the tensor."""
    if cp > 1:
        if cp_group is None:
            raise ValueError(f"with {cp} context-parallel ranks, pass their process group as cp_group")
        torch.distributed.all_reduce(tensor, group=cp_group)
    return tensor
