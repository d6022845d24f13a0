"""Tiles of logits: how they are cut, the matrix product that makes them, and the arithmetic on one tile.

On a GPU torch.compile turns the arithmetic on a tile into few kernels, which read the product once or twice
and keep everything else in registers. With one kernel for each operation, memory traffic took as long as the
matrix products. On a CPU a tile stays in the cache, and the operations write into memory that all tiles
reuse.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

# (bytes of float32 logits of one tile, most tokens of a tile). On a CPU the tile should stay in the
# last-level cache: of 2 to 64 MiB, 8 was the fastest. A GPU needs larger products to be busy.
_CPU_TILE = (8 << 20, 1024)
_GPU_TILE = (128 << 20, 4096)


@dataclass(frozen=True)
class Tiling:
    """Division of this TP rank's [t, words] logits into tiles, so that only one tile is in memory at a time.

    A word is a vocabulary entry. Rows of the output weight that only pad the vocabulary are in no tile.
    """

    start: int
    """Id of this rank's first word."""
    words: int
    """Number of this rank's words, without padding."""
    tokens: int
    """Number of tokens t."""
    chunk_tokens: int
    """Maximum number of tokens in a tile."""
    chunk_vocab: int
    """Maximum number of words in a tile."""

    @classmethod
    def of(cls, weight, tokens: int, vocab_size: int, group, chunk_tokens, chunk_vocab) -> "Tiling":
        start = weight.shape[0] * group.rank()
        words = max(0, min(weight.shape[0], vocab_size - start))
        tile_bytes, most_tokens = _CPU_TILE if weight.device.type == "cpu" else _GPU_TILE
        if chunk_tokens is None:
            chunk_tokens = max(1, min(most_tokens, tokens))
        if chunk_vocab is None and chunk_tokens > 0:
            chunk_vocab = max(1, tile_bytes // (4 * min(chunk_tokens, max(1, tokens))))
        if chunk_tokens < 1 or chunk_vocab < 1:
            raise ValueError(
                f"chunk_tokens and chunk_vocab must be at least 1, but are {chunk_tokens} and {chunk_vocab}"
            )
        return cls(start, words, tokens, min(chunk_tokens, tokens), min(chunk_vocab, words))

    def word_blocks(self) -> list[slice]:
        return [
            slice(i, min(i + self.chunk_vocab, self.words))
            for i in range(0, self.words, self.chunk_vocab or 1)
        ]

    def token_blocks(self) -> list[slice]:
        return [
            slice(i, min(i + self.chunk_tokens, self.tokens))
            for i in range(0, self.tokens, self.chunk_tokens or 1)
        ]

    def memory(self, like: torch.Tensor, dtype: torch.dtype) -> "TileMemory":
        return TileMemory(torch.empty(self.chunk_tokens * self.chunk_vocab, dtype=dtype, device=like.device))

    def columns(self, target: torch.Tensor, words: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (column, inside): the column of each target token in a tile, and if the tile has this token.

        - column: int64 [n, 1], 0 for targets outside the tile.
        - inside: bool [n], False for targets outside the tile.

        target: int64 [n], ids of the target tokens.
        words: the tile's words, as a slice of this rank's words.
        """
        column = target - (self.start + words.start)
        inside = (column >= 0) & (column < words.stop - words.start)
        return torch.where(inside, column, 0)[:, None], inside


@dataclass(frozen=True)
class TileMemory:
    """Memory for one tile, which all tiles reuse. Call it to get a [rows, columns] view of the memory."""

    memory: torch.Tensor

    def __call__(self, rows: int, columns: int) -> torch.Tensor:
        return self.memory[: rows * columns].view(rows, columns)


class Tile(NamedTuple):
    """One tile's matrix product of hidden states and output weight, from which logits are computed."""

    product: torch.Tensor
    """[n, words], float32 or the weight's dtype."""
    scale: torch.Tensor | None
    """float32 [1]: logits are product times scale. None: the product already is the logits."""
    memory: torch.Tensor | None
    """float32 [n, words]: memory for values computed from the product, maybe the product's own. None: each
    operation makes a new tensor, which a compiled function keeps in registers."""


class Projection:
    """Output projection, computed tile by tile. Call it with slices (tokens, words) to get a tile.

    A tile's logits are float32 and divided by the temperature. The next call overwrites the tile.

    hidden: hidden states of the tokens, [t, h].
    weight: this rank's rows of the output weight, [V_padded / tp, h].
    tiling: division of the logits into tiles.
    exact: if True, keep the matrix product's float32 sums. If False, round them to the weight's dtype.
    """

    def __init__(
        self, hidden: torch.Tensor, weight: torch.Tensor, temperature: float, tiling: Tiling, exact: bool
    ):
        self.hidden, self.weight = hidden, weight
        rounded = not exact and weight.dtype != torch.float32
        self._product = tiling.memory(hidden, weight.dtype if rounded else torch.float32)
        self._scale = self._memory = None
        # A product that is not rounded is divided by the temperature at once.
        self._alpha = 1.0 if rounded else 1.0 / temperature
        if rounded:
            self._scale = torch.full((1,), 1.0 / temperature, dtype=torch.float32, device=hidden.device)
        if not hidden.is_cuda:
            self._memory = tiling.memory(hidden, torch.float32) if rounded else self._product

    def __call__(self, tokens: slice, words: slice) -> Tile:
        hidden, weight = self.hidden[tokens], self.weight[words].t()
        shape = len(hidden), weight.shape[1]
        product = self._product(*shape)
        multiply_into(product, hidden, weight, beta=0.0, alpha=self._alpha)
        return Tile(product, self._scale, self._memory and self._memory(*shape))


def multiply_into(out: torch.Tensor, left: torch.Tensor, right: torch.Tensor, beta: float, alpha=1.0) -> None:
    """Set `out` to beta * out + alpha * left @ right.

    If `out` is float32, the product is not rounded to a lower precision of `left` and `right`.
    """
    if out.dtype == left.dtype:
        torch.addmm(out, left, right, beta=beta, alpha=alpha, out=out)
    elif out.is_cuda:
        torch.addmm(out, left, right, out_dtype=torch.float32, beta=beta, alpha=alpha, out=out)
    else:  # a CPU's product has no out_dtype; products of bf16 numbers are exact in float32
        torch.addmm(out, left.float(), right.float(), beta=beta, alpha=alpha, out=out)


def _logits(tile: Tile) -> torch.Tensor:
    """Return a tile's logits, float32 [n, words]. The result may be tile.product or tile.memory."""
    # A scale of one dimension makes bf16 times float32 a float32 result: one pass, rounded once.
    return tile.product if tile.scale is None else torch.mul(tile.product, tile.scale, out=tile.memory)


def rescaled(sums: torch.Tensor, maximum: torch.Tensor, raised: torch.Tensor) -> torch.Tensor:
    """Convert the running sums of `add_tile` from one maximum to a larger one. Return the new sums.

    The sums contain e^(z - maximum) of logits z, so they must change when a larger logit is found.

    sums: float32 [n, 3]; with a reference [n, 5].
    maximum: float32 [n, 1]; with a reference [n, 2]. Largest logits, from which `sums` was computed.
    raised: the larger maximum, with the shape of `maximum`.
    """
    shift = (maximum - raised).unbind(1)
    decay = [one.exp() for one in shift]
    norm, linear, target, *of_reference = sums.unbind(1)
    columns = [norm * decay[0], torch.addcmul(linear, shift[0], norm) * decay[0], target]
    if of_reference:
        ref_norm, cross = of_reference
        columns += [ref_norm * decay[1], torch.addcmul(cross, shift[0] - shift[1], norm) * decay[0]]
    return torch.stack(columns, 1)


def add_tile(
    sums: torch.Tensor,
    maximum: torch.Tensor,
    policy: Tile,
    reference: Tile | None,
    column: torch.Tensor,
    inside: torch.Tensor,
    memory: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add a tile of logits to the running sums over the vocabulary of its n tokens. Return (sums, maximum).

    With z and r the logits / temperature of policy and reference, a = z - max z and c = r - max r:
        norm = sum e^a    linear = sum e^a a    cross = sum e^a (a - c)    ref_norm = sum e^c
    When a maximum grows, the sums are rescaled (Milakov & Gimelshein 2018, "Online normalizer calculation for
    softmax", extended to the other sums).

    sums: float32 [n, 3]: norm, linear and z of the target; with a reference [n, 5], also ref_norm and cross.
    maximum: float32 [n, 1], max z; with a reference [n, 2], also max r.
    policy, reference: the two models' tiles of the same tokens and words. None: there is no reference.
    column: int64 [n, 1], column of each target token in the tile.
    inside: bool [n], False if the tile does not have the target token.
    memory: float32 [n, words], memory for intermediate values. None: operations make new tensors.
    """
    z, r = _logits(policy), None if reference is None else _logits(reference)
    target = torch.where(inside, z.gather(1, column)[:, 0], 0.0)
    peak = torch.stack([one.amax(1) for one in (z, r) if one is not None], 1)
    raised = torch.maximum(maximum, peak)
    sums = rescaled(sums, maximum, raised)
    a = torch.sub(z, raised[:, :1], out=policy.memory)
    of_reference = []
    if reference is None:
        exp = torch.exp(a, out=memory)
    else:
        c = torch.sub(r, raised[:, 1:], out=reference.memory)
        ref_norm = torch.exp(c, out=memory).sum(1)
        exp = torch.exp(a, out=memory)
        of_reference = [ref_norm, -c.sub_(a).mul_(exp).sum(1)]
    norm = exp.sum(1)
    return sums + torch.stack([norm, a.mul_(exp).sum(1), target, *of_reference], 1), raised


class Coefficients(NamedTuple):
    """Coefficients of the loss's gradient with respect to the logits of n tokens.

    With z and r the logits / temperature of policy and reference, a = z - max z and c = r - max r:
    d loss / d logit of word j = e^a_j (constant + linear a_j + ref c_j) + target [j = target token]
    Each coefficient is float32 [n]. None: the term is absent. Entropy and KL need `linear`, the KL needs
    `ref`, and the log-prob needs `target`.
    """

    constant: torch.Tensor
    linear: torch.Tensor | None
    ref: torch.Tensor | None
    target: torch.Tensor | None


def _without_target(
    coefficients: Coefficients,
    maximum: torch.Tensor,
    policy: Tile,
    reference: Tile | None,
    memory: torch.Tensor | None,
) -> torch.Tensor:
    """Return the loss's gradient with respect to a tile's logits, float32 [n, words], except one term.

    The term of the coefficient `target` is missing, so the gradient is incomplete at the target tokens.

    coefficients: coefficients of the gradient for the n tokens.
    maximum: float32 [n, 1], largest logit of each token; with a reference [n, 2], also the reference's.
    policy, reference: the two models' tiles of the same tokens and words. None: the KL is not needed.
    memory: float32 [n, words], memory for intermediate values. None: operations make new tensors.
    """
    a = torch.sub(_logits(policy), maximum[:, :1], out=policy.memory)
    if coefficients.linear is None:
        return a.exp_().mul_(coefficients.constant[:, None])
    exp = torch.exp(a, out=memory)
    grad = a.mul_(coefficients.linear[:, None]).add_(coefficients.constant[:, None])
    if coefficients.ref is not None:
        c = torch.sub(_logits(reference), maximum[:, 1:], out=reference.memory)
        grad.add_(c.mul_(coefficients.ref[:, None]))
    return grad.mul_(exp)


def tile_gradient(
    coefficients: Coefficients,
    maximum: torch.Tensor,
    policy: Tile,
    reference: Tile | None,
    column: torch.Tensor,
    memory: torch.Tensor | None,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the loss's gradient with respect to a tile's logits, as (gradient, at_target) of dtype `dtype`.

    - gradient: [n, words], without the term of the target tokens.
    - at_target: [n, 1], the whole gradient at `column`. The caller writes it into `gradient` where the tile
      has the target. If this function did so, its compiled form would store the whole tile in float32.

    coefficients: coefficients of the gradient for the n tokens.
    maximum: float32 [n, 1], largest logit of each token; with a reference [n, 2], also the reference's.
    policy, reference: the two models' tiles of the same tokens and words. None: the KL is not needed.
    column: int64 [n, 1], column of each target token in the tile.
    memory: float32 [n, words], memory for intermediate values. None: operations make new tensors.
    """
    at = [
        None if tile is None else Tile(tile.product.gather(1, column), tile.scale, None)
        for tile in (policy, reference)
    ]
    at_target = _without_target(coefficients, maximum, at[0], at[1], None)
    if coefficients.target is not None:
        at_target = at_target + coefficients.target[:, None]
    return _without_target(coefficients, maximum, policy, reference, memory).to(dtype), at_target.to(dtype)


def for_device(function: Callable, device: torch.device) -> Callable:
    """Return `function` for use on a device: compiled by torch.compile for a GPU, unchanged for a CPU."""
    return function if device.type == "cpu" else _compiled(function)


@functools.cache
def _compiled(function: Callable) -> Callable:
    # dynamic=True: one compilation is for any number of tokens and words. Otherwise every step would compile
    # again, and after 8 compilations of a function torch runs it uncompiled.
    return torch.compile(function, dynamic=True)
