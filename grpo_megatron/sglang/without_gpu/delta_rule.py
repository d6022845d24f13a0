"""The gated delta rule (arXiv:2412.06464) and its convolution for running requests, with PyTorch operators.

Each running request has a slot in two pools: a window with the last inputs of the convolution, and the
states of the delta rule. The functions read and update the slots of the batch's sequences. They compute in
float32.
"""

import torch
from torch.nn.functional import rms_norm, silu, softplus

# Tokens of a prompt that are computed together.
CHUNK = 64
# Added to the sum of squares by which queries and keys are normalised, as in the published models.
_NORM_EPS = 1e-6


def convolve_prompts(
    x: torch.Tensor,
    weight: torch.Tensor,
    windows: torch.Tensor,
    slots: torch.Tensor,
    starts: torch.Tensor,
    continues: torch.Tensor,
) -> torch.Tensor:
    """Convolve each channel over the new tokens of each sequence, and apply silu. Return [t, channels].

    x: [t, channels], the new tokens of all sequences.
    weight: [channels, k]. The last column is the weight of the token itself.
    windows: [all slots, channels, k - 1], pool of the last k - 1 inputs.
    slots: int64 [n], slot of each sequence.
    starts: int64 [n + 1], first token of each sequence, and t.
    continues: bool [n], False for a sequence that begins with these tokens, whatever its slot contains.
    """
    size, count, lengths = weight.shape[1] - 1, len(slots), starts.diff()
    before = torch.where(continues[:, None, None], windows[slots], 0).transpose(1, 2)
    # `inputs` has for each sequence the window before its new tokens, then these tokens.
    offsets = torch.arange(size)
    firsts = starts[:-1] + torch.arange(count) * size
    own = torch.arange(len(x)) + (torch.arange(count).repeat_interleave(lengths) + 1) * size
    inputs = torch.empty(len(x) + count * size, x.shape[1])
    inputs[(firsts[:, None] + offsets).flatten()] = before.flatten(0, 1).float()
    inputs[own] = x.float()
    weight = weight.float()
    total = sum(inputs[own - back] * weight[:, size - back] for back in range(size + 1))
    windows[slots] = inputs[(firsts + lengths)[:, None] + offsets].transpose(1, 2).to(windows.dtype)
    return silu(total).to(x.dtype)


def convolve_tokens(
    x: torch.Tensor, weight: torch.Tensor, windows: torch.Tensor, slots: torch.Tensor
) -> torch.Tensor:
    """Convolve one new token of each sequence (decoding), and apply silu. Return [n, channels].

    x: [n, channels]. The other arguments are those of `convolve_prompts`.
    """
    inputs = torch.cat([windows[slots].float(), x.float()[..., None]], dim=-1)
    windows[slots] = inputs[..., 1:].to(windows.dtype)
    return silu((inputs * weight.float()).sum(-1)).to(x.dtype)


def gates(
    a_log: torch.Tensor, alpha: torch.Tensor, beta: torch.Tensor, dt_bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (logarithm of each token's decay, share of the old value that it replaces), [t, value heads].

    alpha, beta: [t, value heads], as projected.
    """
    return -a_log.float().exp() * softplus(alpha.float() + dt_bias.float()), beta.float().sigmoid()


def decode(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    log_decay: torch.Tensor,
    beta: torch.Tensor,
    states: torch.Tensor,
    slots: torch.Tensor,
) -> torch.Tensor:
    """Apply the gated delta rule to one new token of each sequence, and update the states.

    Return the outputs, [n, value heads, value dim].

    query, key: [n, key heads, key dim]. They are normalised to length 1 here.
    value: [n, value heads, value dim]. Value heads next to each other share a key head.
    log_decay, beta: [n, value heads], see `gates`.
    states: [all slots, value heads, value dim, key dim], pool of states.
    slots: int64 [n], slot of each sequence.
    """
    query, key = (x[..., None] for x in _of_value_heads(query, key, value.shape[1]))
    state = states[slots].float() * log_decay.exp()[..., None, None]
    change = (value.float()[..., None] - state @ key) * beta[..., None, None]
    state += change * key.mT
    states[slots] = state.to(states.dtype)
    return (state @ query).squeeze(-1).to(value.dtype)


def extend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    log_decay: torch.Tensor,
    beta: torch.Tensor,
    states: torch.Tensor,
    slots: torch.Tensor,
    starts: torch.Tensor,
    continues: torch.Tensor,
) -> torch.Tensor:
    """Apply the gated delta rule to all new tokens of each sequence, such as a prompt, and update the states.

    Return the outputs, [t, value heads, value dim].

    query, key, value, log_decay, beta: as in `decode`, but for the t new tokens of all sequences.
    states, slots: as in `decode`.
    starts, continues: as in `convolve_prompts`.
    """
    query, key = _of_value_heads(query, key, value.shape[1])
    columns = query, key, value.float(), log_decay[..., None], beta[..., None]
    tokens, lengths = torch.cat(columns, dim=-1), starts.diff()
    state = torch.where(continues[:, None, None, None], states[slots].float(), 0)
    outputs = torch.empty(value.shape)
    for first in range(0, int(lengths.max()), CHUNK):
        rows = (lengths > first).nonzero()[:, 0]
        count = (lengths[rows] - first).clamp(max=CHUNK)
        place = torch.arange(int(count.max()))
        real = place < count[:, None]
        index = (starts[:-1][rows] + first)[:, None] + place
        # Unused places at the end of a chunk have key 0, beta 0 and decay 1, so they keep the state.
        chunk = torch.where(real[..., None, None], tokens[index.where(real, 0)], 0).transpose(1, 2)
        found, state[rows] = _chunk(*chunk.split([x.shape[-1] for x in columns], dim=-1), state[rows])
        outputs[index[real]] = found.transpose(1, 2)[real]
    states[slots] = state.to(states.dtype)
    return outputs.to(value.dtype)


def _chunk(query, key, value, log_decay, beta, state) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (outputs [n, heads, c, value dim], new state) for the next c tokens of each sequence.

    A token's change of the state depends on the changes by the chunk's earlier tokens. A triangular system
    resolves this for all tokens at once (arXiv:2412.06464, section 3.3).

    query, key: [n, heads, c, key dim].
    value: [n, heads, c, value dim].
    log_decay, beta: [n, heads, c, 1].
    state: [n, heads, value dim, key dim], before these tokens.
    """
    total = log_decay.double().cumsum(-2)
    future = torch.ones(key.shape[-2], key.shape[-2], dtype=torch.bool).triu(1)
    decay = (total - total.mT).float().masked_fill(future, -torch.inf).exp()
    since, until = total.float().exp(), (total[..., -1:, :] - total).float().exp()
    system = (key @ key.mT) * decay * beta
    target = beta * (value - since * (key @ state.mT))
    change = torch.linalg.solve_triangular(system, target, upper=False, unitriangular=True)
    outputs = ((query @ key.mT) * decay) @ change + since * (query @ state.mT)
    return outputs, state * since[..., -1:, :] + change.mT @ (key * until)


def _of_value_heads(query, key, value_heads: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return queries and keys, normalised and one for each value head: float32 [t, value heads, key dim]."""
    query, key = query.float(), key.float()
    query, key = (x * (x.square().sum(-1, keepdim=True) + _NORM_EPS).rsqrt() for x in (query, key))
    query = query * query.shape[-1] ** -0.5
    groups = value_heads // key.shape[1]
    return query.repeat_interleave(groups, 1), key.repeat_interleave(groups, 1)


def gated_norm(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Normalise the last dimension of x, and multiply by the silu of `gate`. Return the dtype of x.

    x, gate: [..., d].
    weight: [d], weight of the RMS norm.
    """
    normed = rms_norm(x.float(), weight.shape, weight.float(), eps)
    return (normed * silu(gate.float())).to(x.dtype)
