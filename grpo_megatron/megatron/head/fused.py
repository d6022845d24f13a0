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

from grpo_megatron.megatron.head.tiles import (
    Coefficients,
    Projection,
    Tiling,
    add_tile,
    for_device,
    multiply_into,
    rescaled,
    tile_gradient,
)

# A value below any logit. Minus infinity would give inf - inf = NaN on a rank that holds no word at all.
_NEVER = -1e30


class _Sums:
    """Running sums over the vocabulary, from which each token's log-prob, entropy and KL are computed.

    Logits exist one tile (some tokens x some words) at a time. `add` adds a tile to the sums. Each block of
    tokens has its own tensors. With views of one tensor for all tokens, the compiled function `add_tile`
    would be compiled again for each size of this tensor.

    tiling: division of the logits into tiles.
    with_reference: if True, hold the sums that the KL needs, too.
    """

    def __init__(self, tiling: Tiling, with_reference: bool, device: torch.device):
        kinds, models = (5, 2) if with_reference else (3, 1)
        self._empty = torch.empty(0, kinds, device=device), torch.empty(0, models, device=device)
        self._blocks = [
            (
                torch.zeros(tokens.stop - tokens.start, kinds, device=device),
                torch.full((tokens.stop - tokens.start, models), _NEVER, device=device),
            )
            for tokens in tiling.token_blocks()
        ]
        self._add_tile = for_device(add_tile, device)

    def add(self, block: int, *tile) -> None:
        """Add one tile of logits to the sums of its block of tokens.

        block: index of the block in tiling.token_blocks().
        tile: arguments of the function `add_tile` after its first two, which are the sums so far and the
            largest logits so far.
        """
        self._blocks[block] = self._add_tile(*self._blocks[block], *tile)

    def reduced(self, group) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the sums over the whole vocabulary, of which each TP rank has summed its part.

        All TP ranks must call this. Returns (sums, maximum) of all t tokens, with the columns that `add_tile`
        describes:

        - sums: float32 [t, 3]; with a reference [t, 5].
        - maximum: float32 [t, 1], largest logit; with a reference [t, 2], also the reference's.
        """
        sums, maximum = (torch.cat(parts) for parts in zip(self._empty, *self._blocks, strict=True))
        if group.size() > 1:
            highest = maximum.clone()
            dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=group)
            sums, maximum = rescaled(sums, maximum, highest), highest
            dist.all_reduce(sums, op=dist.ReduceOp.SUM, group=group)
        return sums, maximum


@dataclass(frozen=True)
class HeadTask:
    """Inputs of FusedHead that get no gradient: target ids and settings.

    FusedHead is the autograd function that computes log-probs from hidden states.
    """

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

    forward: takes hidden [t, h], weight [V_padded / tp, h], the reference's hidden and weight (None: no KL),
        and a HeadTask with the settings. Returns (logp, entropy, kl), each float32 [t]. Without a reference,
        kl is None.
    """

    @staticmethod
    def forward(ctx, hidden, weight, ref_hidden, ref_weight, task: "HeadTask"):
        target, temperature, tiling = task.target, task.temperature, task.tiling
        ctx.set_materialize_grads(False)  # an output that the loss does not use costs nothing in the backward
        with_reference = ref_hidden is not None
        policy = Projection(hidden, weight, temperature, tiling, task.exact)
        reference = (
            Projection(ref_hidden, ref_weight, temperature, tiling, task.exact) if with_reference else None
        )
        memory = None if hidden.is_cuda else tiling.memory(hidden, torch.float32)
        running = _Sums(tiling, with_reference, hidden.device)
        for words in tiling.word_blocks():
            for block, tokens in enumerate(tiling.token_blocks()):
                tile = policy(tokens, words)
                running.add(
                    block,
                    tile,
                    reference(tokens, words) if reference else None,
                    *tiling.columns(target[tokens], words),
                    memory and memory(*tile.product.shape),
                )
        sums, maximum = running.reduced(task.group)
        norm, linear, z_target, *of_reference = sums.unbind(1)
        log_norm = norm.log()
        known = (target >= 0) & (target < task.vocab_size)
        logp = torch.where(known, z_target - maximum[:, 0] - log_norm, torch.nan)
        entropy = log_norm - linear / norm
        kl = log_ref_norm = None
        if with_reference:
            ref_norm, cross = of_reference
            log_ref_norm = ref_norm.log()
            kl = cross / norm - log_norm + log_ref_norm
        ctx.save_for_backward(
            hidden, weight, ref_hidden, ref_weight, target, maximum, log_norm, log_ref_norm, entropy, kl
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
        coefficients = _coefficients(grad_logp, grad_entropy, grad_kl, *statistics, ctx.temperature)
        policy = Projection(hidden, weight, ctx.temperature, tiling, ctx.exact)
        reference = memory = None
        if coefficients.ref is not None:
            reference = Projection(ref_hidden, ref_weight, ctx.temperature, tiling, ctx.exact)
        if coefficients.linear is not None and not hidden.is_cuda:
            memory = tiling.memory(hidden, torch.float32)
        grad_hidden = torch.zeros_like(hidden, dtype=torch.float32) if ctx.needs_input_grad[0] else None
        grad_weight = _WeightGradient(weight, tiling, ctx.parameter) if ctx.needs_input_grad[1] else None
        gradient_of = for_device(tile_gradient, hidden.device)
        blocks = [  # copies instead of views, see `_Sums`
            (tokens, _copies(coefficients, tokens), maximum[tokens].clone())
            for tokens in tiling.token_blocks()
        ]
        for words in tiling.word_blocks():
            for tokens, own_coefficients, own_maximum in blocks:
                tile = policy(tokens, words)
                column, inside = tiling.columns(target[tokens], words)
                grad, at_target = gradient_of(
                    own_coefficients,
                    own_maximum,
                    tile,
                    reference(tokens, words) if reference else None,
                    column,
                    memory and memory(*tile.product.shape),
                    weight.dtype,
                )
                grad.scatter_(1, column, torch.where(inside[:, None], at_target, grad.gather(1, column)))
                if grad_hidden is not None:
                    multiply_into(grad_hidden[tokens], grad, weight[words], beta=1.0)
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


def _coefficients(
    grad_logp, grad_entropy, grad_kl, log_norm, log_ref_norm, entropy, kl, temperature
) -> Coefficients:
    """Return the coefficients of the loss's gradient with respect to the logits of t tokens.

    The backward pass computes the gradient of each tile of logits from them. They include the division by the
    temperature and, except `target`, by the softmax denominator.

    grad_logp, grad_entropy, grad_kl: gradients of FusedHead's outputs, float32 [t]. None: the loss does not
        use this output.
    log_norm, log_ref_norm: log of the sum of e^(z - max z) over the vocabulary, float32 [t]. z is logit /
        temperature, of the policy and of the reference.
    entropy, kl: outputs of the forward pass, float32 [t].
    """
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
    return Coefficients(constant * scale, linear, ref, target)


def _copies(coefficients: Coefficients, tokens: slice) -> Coefficients:
    return Coefficients(*(value if value is None else value[tokens].clone() for value in coefficients))


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

        Tiles with the same words must be added directly after each other.

        words: the tile's words, as a slice of this rank's words.
        first, last: True for the first and for the last of the tiles with these words.
        """
        out = self.out[words]
        sums = out if self.block is None else self.block[: len(out)]
        overwrite = first and (self.parameter is None or self.block is not None)
        multiply_into(sums, grad_logits.t(), hidden, beta=0.0 if overwrite else 1.0)
        if last and self.block is not None:
            out.copy_(sums) if self.parameter is None else out.add_(sums)

    def result(self) -> torch.Tensor | None:
        """Return what autograd gets as the weight's gradient. Megatron's linear layers return the same.

        - If the gradient was not added to main_grad: the gradient.
        - If it was, and DDP has hooks on the parameter: a placeholder that makes the hooks run. It is a
          tensor of undefined values, or of zeros if Megatron has set `zero_out_wgrad` on the parameter.
        - If it was, and DDP has no hooks on the parameter: None.
        """
        if self.parameter is None:
            return self.out
        if not hasattr(self.parameter, "grad_added_to_main_grad"):
            return None
        self.parameter.grad_added_to_main_grad = True
        read = getattr(self.parameter, "zero_out_wgrad", False)
        return torch.zeros_like(self.parameter) if read else torch.empty_like(self.parameter)
