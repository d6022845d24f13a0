"""The gated delta rule (arXiv:2412.06464) and the causal convolution before it, over packs of sequences.

A head has a state S, a matrix [d, e]. Each token reads and changes it: S is multiplied by the token's decay,
the value that S holds for the token's key is moved towards the token's value by the share `beta`, and the
output is S read with the query. The state is zero at the beginning of every sequence.
"""

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from grpo_megatron.batch.layout import on_device

# Tokens of a chunk. All tokens of a chunk are computed together, and a sequence's chunks one after the other.
CHUNK = 64
# Added to the sum of squares by which queries and keys are normalised, as in the published models.
_NORM_EPS = 1e-6


@dataclass(frozen=True)
class Chunks:
    """Division of a pack's sequences into chunks of equal size, which the delta rule computes together.

    The chunks are ordered by depth: the first chunk of every sequence, then the second chunk of every
    sequence that has one, and so on. At each depth the sequences have the same order, and those that end
    there come last, so the states that go on are the first ones. A sequence's last chunk may have unused
    places at its end.
    """

    size: int
    """Number of tokens of a chunk."""
    counts: tuple[int, ...]
    """Number of chunks at each depth."""
    places: torch.Tensor
    """int64 [t], place of each of the pack's tokens among the places of all chunks."""
    position_ids: torch.Tensor
    """int64 [t], position of each of the pack's tokens in its sequence."""
    cu_seqlens: torch.Tensor
    """int64 [S + 1], ends of the pack's S sequences, after a 0."""
    cu_seqlens_cpu: torch.Tensor
    """The same in host memory."""

    @classmethod
    def of(cls, lengths: np.ndarray, device: torch.device, size: int = CHUNK) -> "Chunks":
        """Divide the sequences of a pack into chunks.

        lengths: number of tokens of each sequence, including its padding, in the order of the pack.
        device: device of the index tensors.
        """
        depths = -(-lengths // size)
        rank = np.empty(len(lengths), dtype=np.int64)
        rank[np.argsort(-depths, kind="stable")] = np.arange(len(lengths))
        counts = np.array([np.count_nonzero(depths > depth) for depth in range(depths.max())])
        first = np.cumsum(counts) - counts
        sequence = np.repeat(np.arange(len(lengths)), lengths)
        position = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        places = (first[position // size] + rank[sequence]) * size + position % size
        ends = torch.from_numpy(np.cumsum([0, *lengths]))
        tensors = (on_device(x, device) for x in (torch.from_numpy(places), torch.from_numpy(position), ends))
        return cls(size, tuple(counts.tolist()), *tensors, ends)

    def filled(self, x: torch.Tensor) -> torch.Tensor:
        """Return the tokens' values x [t, ...] as [chunks, size, ...]. Unused places are 0."""
        places = x.new_zeros(sum(self.counts) * self.size, *x.shape[1:]).index_copy(0, self.places, x)
        return places.unflatten(0, (-1, self.size))

    def taken(self, x: torch.Tensor) -> torch.Tensor:
        """Undo `filled`: return the tokens' values [t, ...] of the values x [chunks, size, ...]."""
        return x.flatten(0, 1).index_select(0, self.places)


def gated_delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    log_decay: torch.Tensor,
    beta: torch.Tensor,
    chunks: Chunks,
) -> torch.Tensor:
    """Return the outputs of the gated delta rule for all tokens of a pack, [t, value heads, e].

    Queries and keys are normalised to length 1. Everything is computed in float32, or float64 if the inputs
    are. The outputs have the dtype of the values.

    query, key: [t, key heads, d].
    value: [t, value heads, e]. The number of value heads is a multiple of the number of key heads; value
        heads next to each other share a key head.
    log_decay: [t, value heads], logarithm of the factor by which a token multiplies the state; at most 0.
    beta: [t, value heads], share of the old value that a token replaces, 0 to 1.
    chunks: division of the pack's sequences into chunks.
    """
    given, dtype = value.dtype, torch.promote_types(value.dtype, torch.float32)
    groups = value.shape[1] // key.shape[1]
    query, key = (_in_heads(chunks, _normalised(x.to(dtype)), 1) for x in (query, key))
    value = _in_heads(chunks, value.to(dtype), groups)
    beta, log_decay = (_in_heads(chunks, x.to(dtype)[..., None], groups) for x in (beta, log_decay))
    query = query * query.shape[-1] ** -0.5
    # Logarithm of the decay from the chunk's beginning to each token. In float32, the small difference of
    # two large sums would lose digits.
    total = log_decay.double().cumsum(-2)
    # decay[i, j]: decay from token j of a chunk to token i, for j <= i.
    future = torch.ones(chunks.size, chunks.size, dtype=torch.bool, device=value.device).triu(1)
    decay = (total - total.mT).to(dtype).masked_fill(future, -torch.inf).exp()
    since, until = total.to(dtype).exp(), (total[..., -1:, :] - total).to(dtype).exp()
    within = (query @ key.mT) * decay
    # A token's change of the state depends on the changes by the chunk's earlier tokens. `solve` resolves
    # this for all tokens at once (arXiv:2412.06464, section 3.3).
    system = (key @ key.mT) * decay * beta

    def solve(first: int, target: torch.Tensor) -> torch.Tensor:
        return torch.linalg.solve_triangular(system[first:], target, upper=False, unitriangular=True)

    later = chunks.counts[0]  # chunks from this one on have a chunk before them
    change = solve(0, value * beta)
    read = solve(later, (key * (beta * since))[later:])
    out = _scan(chunks.counts, change, read, within, (query * since)[later:], key * until, since[..., -1:, :])
    return chunks.taken(out.permute(0, 3, 1, 2, 4).flatten(2, 3)).to(given)


def _scan(counts, change, read, within, query, key, decay) -> torch.Tensor:
    """Pass the states from chunk to chunk. Return the outputs [chunks, key heads, groups, size, e].

    counts: number of chunks at each depth.
    change: [chunks, ..., size, e], values that the tokens add to a state of zero.
    read: [later chunks, ..., size, d], keys with which tokens subtract what the state before the chunk holds.
    within: [chunks, ..., size, size], weights with which a token's output sums the changes of its chunk.
    query: [later chunks, ..., size, d], queries times the decay from the chunk's beginning.
    key: [chunks, ..., size, d], keys times the decay to the chunk's end.
    decay: [chunks, ..., 1, 1], decay of a whole chunk.

    Later chunks are those that have a chunk before them.
    """
    # `split` and not slices: the gradient of a slice is a tensor as large as the whole.
    change, within, key, decay = (x.split(counts) for x in (change, within, key, decay))
    read, query = (x.split(counts[1:]) for x in (read, query))
    outputs, state = [], None
    for depth, count in enumerate(counts):
        new = change[depth]
        if depth == 0:
            outputs.append(within[0] @ new)
        else:
            state = state[:count] if count < len(state) else state
            new = new - read[depth - 1] @ state
            outputs.append(within[depth] @ new + query[depth - 1] @ state)
        if depth + 1 < len(counts):
            written = key[depth].mT @ new
            state = written if depth == 0 else state * decay[depth] + written
    return torch.cat(outputs)


def _in_heads(chunks: Chunks, x: torch.Tensor, groups: int) -> torch.Tensor:
    """Return the tokens' values x [t, heads, d] in chunks: [chunks, key heads, groups, size, d].

    groups: number of heads that share a key head.
    """
    return chunks.filled(x).unflatten(2, (-1, groups)).permute(0, 2, 3, 1, 4)


def _normalised(x: torch.Tensor) -> torch.Tensor:
    return x * (x.square().sum(-1, keepdim=True) + _NORM_EPS).rsqrt()


def causal_convolution(x: torch.Tensor, weight: torch.Tensor, chunks: Chunks) -> torch.Tensor:
    """Convolve each channel over the tokens of its sequence, and apply silu. Return [t, channels].

    A token's result is the weighted sum of the token and the k - 1 tokens before it in its sequence. It is
    computed in float32, or float64 if x is, and has the dtype of x.

    x: [t, channels].
    weight: [channels, k]. The last column is the weight of the token itself.
    chunks: describes the pack.
    """
    dtype = torch.promote_types(x.dtype, torch.float32)
    values, weight = x.to(dtype), weight.to(dtype)
    total = values * weight[:, -1]
    for back in range(1, weight.shape[1]):
        # Rows that `roll` takes from before the sequence's beginning count as zero.
        earlier = values.roll(back, 0) * (chunks.position_ids >= back)[:, None]
        total = torch.addcmul(total, earlier, weight[:, -1 - back])
    return F.silu(total).to(x.dtype)
