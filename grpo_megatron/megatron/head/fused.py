"""Output projection fused with log-softmax, entropy and KL in one autograd function.

Logits exist one tile (some tokens x some words) at a time. The forward pass keeps running sums over the
vocabulary; the backward pass computes each tile again. A forward pass costs two all-reduces over TP, of
[t]-sized tensors; a backward pass costs none.

A tile spans only part of the vocabulary: with whole rows, few tokens would fit in a tile, and products would
be slow. Also, the gradient of a block of words can be finished in float32 before the next block begins.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

# A value below any logit. Minus infinity would give inf - inf = NaN on a rank that holds no word at all.
_NEVER = -1e30

# (bytes of float32 logits of one tile, most tokens of a tile). On a CPU the tile should stay in the
# last-level cache: of 2 to 64 MiB, 8 was the fastest. A GPU needs larger products to be busy.
_CPU_TILE = (8 << 20, 1024)
_GPU_TILE = (128 << 20, 4096)


@dataclass(frozen=True)
class Tiling:
    """Division of this TP rank's [t, words] logits into tiles, so that only one tile is in memory at a time.

    A word is a vocabulary entry. No tile has rows of the output weight that only pad the vocabulary.
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

    def scratch(self, like: torch.Tensor, dtype: torch.dtype) -> "_Scratch":
        return _Scratch(torch.empty(self.chunk_tokens * self.chunk_vocab, dtype=dtype, device=like.device))

    def columns(self, target: torch.Tensor, words: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (column, inside): the column of each target token in a tile, and whether the tile has it.

        target: int64 [n]. words: the tile's words, as a slice of this rank's words.
        column: int64 [n, 1], 0 for targets outside the tile. inside: bool [n], False for targets outside.
        """
        column = target - (self.start + words.start)
        inside = (column >= 0) & (column < words.stop - words.start)
        return torch.where(inside, column, 0)[:, None], inside


@dataclass(frozen=True)
class _Scratch:
    """Memory for one tile, which all tiles reuse. Call it to get a [rows, columns] view of the memory."""

    memory: torch.Tensor

    def __call__(self, rows: int, columns: int) -> torch.Tensor:
        return self.memory[: rows * columns].view(rows, columns)


class _Projection:
    """Output projection, computed tile by tile. Call it with slices (tokens, words) to get a tile's logits.

    Logits are float32 and divided by the temperature. The next call overwrites them.
    exact: if True, keep the matrix product's float32 sums. If False, round them to the weight's dtype.
    """

    def __init__(
        self, hidden: torch.Tensor, weight: torch.Tensor, temperature: float, tiling: Tiling, exact: bool
    ):
        self.hidden, self.weight, self.temperature, self.exact = hidden, weight, temperature, exact
        self.logits = tiling.scratch(hidden, torch.float32)
        self.low = None
        if weight.dtype != torch.float32:
            self.low = tiling.scratch(hidden, weight.dtype)
            # A scale of one dimension makes bf16 times float32 a float32 result: one pass, rounded once.
            self.scale = torch.full((1,), 1.0 / temperature, dtype=torch.float32, device=hidden.device)

    def __call__(self, tokens: slice, words: slice) -> torch.Tensor:
        hidden, weight = self.hidden[tokens], self.weight[words]
        logits = self.logits(len(hidden), len(weight))
        if self.low is None:
            return torch.addmm(logits, hidden, weight.t(), beta=0, alpha=1.0 / self.temperature, out=logits)
        if self.exact and hidden.is_cuda:
            return torch.mm(hidden, weight.t(), out_dtype=torch.float32, out=logits).mul_(
                1.0 / self.temperature
            )
        if self.exact:  # a CPU's torch.mm has no out_dtype; products of bf16 numbers are exact in float32
            factors = hidden.float(), weight.float().t()
            return torch.addmm(logits, *factors, beta=0, alpha=1.0 / self.temperature, out=logits)
        low = torch.mm(hidden, weight.t(), out=self.low(len(hidden), len(weight)))
        return torch.mul(low, self.scale, out=logits)

    def in_weight_dtype(self, logits: torch.Tensor) -> torch.Tensor:
        return logits if self.low is None else self.low(*logits.shape).copy_(logits)


class _Sums:
    """Running sums over the vocabulary, each float32 [t], from which log-prob, entropy and KL are computed.

    With z and r the logits / temperature of policy and reference, a = z - max z and c = r - max r:
        norm = sum e^a    linear = sum e^a a    cross = sum e^a (a - c)    ref_norm = sum e^c
    When a maximum grows, the sums are rescaled (Milakov & Gimelshein 2018, "Online normalizer calculation for
    softmax", extended to the other sums).
    """

    def __init__(self, tokens: int, with_reference: bool, device: torch.device):
        self.with_reference = with_reference
        self.maximum = torch.full(
            (2 if with_reference else 1, tokens), _NEVER, dtype=torch.float32, device=device
        )
        # Rows: norm, linear, z of the target; with a reference also ref_norm and cross. One tensor needs only
        # one collective.
        self.sums = torch.zeros(5 if with_reference else 3, tokens, dtype=torch.float32, device=device)

    def add(self, tokens: slice, z, r, column, inside, scratch: _Scratch) -> None:
        """Add the logits of one tile to the running sums of the tile's tokens.

        z: the policy's logits in this tile. r: the reference's logits, or None. Both are overwritten.
        column, inside: from Tiling.columns. scratch: memory for intermediate values.
        """
        self.sums[2, tokens] += torch.where(inside, z.gather(1, column)[:, 0], 0.0)
        peak = torch.stack([z.amax(1), r.amax(1)]) if self.with_reference else z.amax(1)[None]
        self._raise_maximum(tokens, torch.maximum(self.maximum[:, tokens], peak))
        sums, exp = self.sums[:, tokens], scratch(*z.shape)
        a = z.sub_(self.maximum[0, tokens, None])
        if self.with_reference:
            c = r.sub_(self.maximum[1, tokens, None])
            sums[3] += torch.exp(c, out=exp).sum(1)
        sums[0] += torch.exp(a, out=exp).sum(1)
        if self.with_reference:
            sums[4] -= c.sub_(a).mul_(exp).sum(1)
        sums[1] += a.mul_(exp).sum(1)

    def reduce(self, group) -> None:
        """Add up all TP ranks' sums over their parts of the vocabulary. All TP ranks must call this."""
        if group.size() > 1:
            highest = self.maximum.clone()
            dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=group)
            self._raise_maximum(slice(None), highest)
            dist.all_reduce(self.sums, op=dist.ReduceOp.SUM, group=group)

    def _raise_maximum(self, tokens: slice, maximum: torch.Tensor) -> None:
        shift = self.maximum[:, tokens] - maximum
        decay = shift.exp()
        sums = self.sums[:, tokens]
        sums[1].addcmul_(shift[0], sums[0]).mul_(decay[0])
        if self.with_reference:
            sums[4].addcmul_(shift[0] - shift[1], sums[0]).mul_(decay[0])
            sums[3].mul_(decay[1])
        sums[0].mul_(decay[0])
        self.maximum[:, tokens] = maximum


@dataclass(frozen=True)
class HeadTask:
    """Arguments of the autograd function FusedHead that get no gradient."""

    target: torch.Tensor
    """int64 [t]: id of the word whose log-prob is computed."""
    temperature: float
    """Divisor of the logits."""
    vocab_size: int
    """Number of vocabulary entries (words), without padding."""
    tiling: Tiling
    """Tiles of this rank's logits."""
    group: dist.ProcessGroup
    """TP process group, over whose ranks the vocabulary is split."""
    into_main_grad: bool
    """If True, add the weight's gradient to its `main_grad`."""
    exact: bool
    """If True, do not round logits to the weight's dtype."""


class FusedHead(torch.autograd.Function):
    """Autograd function for output projection, log-softmax, entropy and KL, without storing all logits.

    With z and r the logits / temperature of policy and reference, p = softmax(z), q = softmax(r), j a word:

    logp_target = log p_target          d logp / dz_j = [j = target] - p_j
    H    = -sum p log p                 d H    / dz_j = -p_j (log p_j + H)
    kl   = sum p (log p - log q)        d kl   / dz_j = p_j (log p_j - log q_j - kl)
    """

    @staticmethod
    def forward(ctx, hidden, weight, ref_hidden, ref_weight, task: "HeadTask"):
        target, temperature, tiling = task.target, task.temperature, task.tiling
        ctx.set_materialize_grads(False)  # an output that the loss does not use costs nothing in the backward
        with_reference = ref_hidden is not None
        policy = _Projection(hidden, weight, temperature, tiling, task.exact)
        reference = (
            _Projection(ref_hidden, ref_weight, temperature, tiling, task.exact) if with_reference else None
        )
        scratch = tiling.scratch(hidden, torch.float32)
        state = _Sums(tiling.tokens, with_reference, hidden.device)
        for words in tiling.word_blocks():
            for tokens in tiling.token_blocks():
                r = reference(tokens, words) if with_reference else None
                state.add(tokens, policy(tokens, words), r, *tiling.columns(target[tokens], words), scratch)
        state.reduce(task.group)
        norm, linear, z_target, *of_reference = state.sums
        log_norm = norm.log()
        known = (target >= 0) & (target < task.vocab_size)
        logp = torch.where(known, z_target - state.maximum[0] - log_norm, torch.nan)
        entropy = log_norm - linear / norm
        kl = log_ref_norm = None
        if with_reference:
            ref_norm, cross = of_reference
            log_ref_norm = ref_norm.log()
            kl = cross / norm - log_norm + log_ref_norm
        ctx.save_for_backward(
            hidden, weight, ref_hidden, ref_weight, target, state.maximum, log_norm, log_ref_norm, entropy, kl
        )
        ctx.temperature, ctx.tiling, ctx.exact = temperature, tiling, task.exact
        # Where hooks offload or count saved tensors, a saved weight comes back as another tensor without
        # main_grad.
        ctx.parameter = weight if task.into_main_grad else None
        return logp, entropy, kl

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_logp, grad_entropy, grad_kl):
        hidden, weight, ref_hidden, ref_weight, target, maximum, *statistics = ctx.saved_tensors
        tiling = ctx.tiling
        coefficients = _Coefficients.of(grad_logp, grad_entropy, grad_kl, *statistics, ctx.temperature)
        policy = _Projection(hidden, weight, ctx.temperature, tiling, ctx.exact)
        reference = scratch = None
        if coefficients.ref is not None:
            reference = _Projection(ref_hidden, ref_weight, ctx.temperature, tiling, ctx.exact)
        if coefficients.linear is not None:
            scratch = tiling.scratch(hidden, torch.float32)
        grad_hidden = torch.zeros_like(hidden, dtype=torch.float32) if ctx.needs_input_grad[0] else None
        grad_weight = _WeightGradient(weight, tiling, ctx.parameter) if ctx.needs_input_grad[1] else None
        for words in tiling.word_blocks():
            for tokens in tiling.token_blocks():
                a = policy(tokens, words).sub_(maximum[0, tokens, None])
                c = reference(tokens, words).sub_(maximum[1, tokens, None]) if reference else None
                grad = coefficients.grad_logits(tokens, a, c, *tiling.columns(target[tokens], words), scratch)
                grad = policy.in_weight_dtype(grad)
                if grad_hidden is not None:
                    _add_product(grad_hidden[tokens], grad, weight[words])
                if grad_weight is not None:
                    grad_weight.add(
                        words,
                        grad,
                        hidden[tokens],
                        first=tokens.start == 0,
                        last=tokens.stop == tiling.tokens,
                    )
        return (
            None if grad_hidden is None else grad_hidden.to(hidden.dtype),
            None if grad_weight is None else grad_weight.result(),
            *[None] * 3,  # for ref_hidden, ref_weight and task
        )


@dataclass(frozen=True)
class _Coefficients:
    """Coefficients of the loss's gradient with respect to the logits. With a and c as in `_Sums`:

    d loss / d logit of word j = e^a_j (constant + linear a_j + ref c_j) + target [j = target token]
    Each coefficient is float32 [t], or None if the loss uses no output that needs it. The coefficients
    combine the three derivatives of `FusedHead`, with log p = a - log_norm and log q = c - log_ref_norm, and
    include the division by norm and temperature.
    """

    constant: torch.Tensor
    linear: torch.Tensor | None
    ref: torch.Tensor | None
    target: torch.Tensor | None

    @classmethod
    def of(
        cls, grad_logp, grad_entropy, grad_kl, log_norm, log_ref_norm, entropy, kl, temperature
    ) -> "_Coefficients":
        constant = torch.zeros_like(log_norm)
        linear = ref = target = None
        scale = torch.exp(-log_norm) / temperature
        if grad_logp is not None:
            constant -= grad_logp
            target = grad_logp / temperature
        if grad_entropy is not None:
            constant += grad_entropy * (log_norm - entropy)
            linear = -grad_entropy * scale
        if grad_kl is not None:
            constant += grad_kl * (log_ref_norm - log_norm - kl)
            linear = grad_kl * scale if linear is None else linear + grad_kl * scale
            ref = -grad_kl * scale
        return cls(constant * scale, linear, ref, target)

    def grad_logits(self, tokens: slice, a, c, column, inside, scratch: _Scratch | None) -> torch.Tensor:
        """Return the loss's gradient with respect to one tile's logits. `a` and `c` are overwritten.

        a, c: see `_Sums`; here of one tile. column, inside: from Tiling.columns. scratch: working memory.
        """
        if self.linear is None:
            grad = a.exp_().mul_(self.constant[tokens, None])
        else:
            exp = torch.exp(a, out=scratch(*a.shape))
            grad = a.mul_(self.linear[tokens, None]).add_(self.constant[tokens, None])
            if self.ref is not None:
                grad.add_(c.mul_(self.ref[tokens, None]))
            grad.mul_(exp)
        if self.target is not None:
            grad.scatter_add_(1, column, torch.where(inside, self.target[tokens], 0.0)[:, None])
        return grad


class _WeightGradient:
    """Accumulator for the gradient of the output weight. Sums over tokens are float32.

    parameter: the gradient is added to this parameter's `main_grad`. None: the gradient is a new tensor.
    """

    def __init__(self, weight: torch.Tensor, tiling: Tiling, parameter: torch.nn.Parameter | None):
        self.parameter = parameter
        self.out = torch.empty_like(weight) if parameter is None else parameter.main_grad
        if parameter is None:
            self.out[tiling.words :].zero_()
            if not tiling.tokens:
                self.out.zero_()
        self.block = None
        if self.out.dtype != torch.float32:
            self.block = torch.empty(
                tiling.chunk_vocab, weight.shape[1], dtype=torch.float32, device=weight.device
            )

    def add(
        self, words: slice, grad_logits: torch.Tensor, hidden: torch.Tensor, first: bool, last: bool
    ) -> None:
        """Add one tile's gradient: grad_logits.T @ hidden, with grad_logits [n, words] and hidden [n, h].

        Add all tiles with the same words in a row. first, last: True for the first and last of these tiles.
        """
        out = self.out[words]
        sums = out if self.block is None else self.block[: len(out)]
        overwrite = first and (self.parameter is None or self.block is not None)
        _add_product(sums, grad_logits.t(), hidden, overwrite)
        if last and self.block is not None:
            out.copy_(sums) if self.parameter is None else out.add_(sums)

    def result(self) -> torch.Tensor | None:
        """Return what autograd gets as the weight's gradient.

        If the gradient was added to main_grad, this is a placeholder that makes the parameter's hooks run: a
        tensor of undefined values, or of zeros if Megatron has set `zero_out_wgrad` on the parameter. If DDP
        has no hooks on the parameter, the result is None. Megatron's linear layers do the same.
        """
        if self.parameter is None:
            return self.out
        if not hasattr(self.parameter, "grad_added_to_main_grad"):
            return None
        self.parameter.grad_added_to_main_grad = True
        read = getattr(self.parameter, "zero_out_wgrad", False)
        return torch.zeros_like(self.parameter) if read else torch.empty_like(self.parameter)


def _add_product(out: torch.Tensor, left: torch.Tensor, right: torch.Tensor, overwrite: bool = False) -> None:
    """Add left @ right to `out` in place, or overwrite `out` with it. out: float32 [rows, columns]."""
    if out.dtype == left.dtype:
        out.addmm_(left, right, beta=0 if overwrite else 1)
    elif overwrite:
        out.copy_(left @ right)
    else:
        out.add_(left @ right)
