"""The delta rule and convolution of CPU engines, in the pieces in which an engine computes requests, against
whole sequences in float64.
"""

import pytest
import torch
import torch.nn.functional as F

from grpo_megatron.sglang.without_gpu import delta_rule

# Numbers of tokens that each request gets in its steps: pieces of its prompt, then tokens.
PIECES = [(70, 77, 1, 1, 1), (1, 1, 1), (64, 64, 1, 1), (130,), (5, 62, 1, 1, 1)]
SLOTS, LEFT_BEHIND = [6, 2, 7, 1, 4], 50.0
KEY_HEADS, GROUPS, KEY_DIM, VALUE_DIM, KERNEL = 2, 3, 16, 12, 4


def steps(prompts, tokens, pool, *inputs):
    """Run functions as an engine does, on a pool of slots. Return each request's output.

    prompts, tokens: functions for steps with prompts, and for steps with one token of each request.
    inputs: lists of [tokens of a request, ...].
    """
    done, outputs = [0] * len(PIECES), [[] for _ in PIECES]
    for step in range(max(map(len, PIECES))):
        batch = [request for request, pieces in enumerate(PIECES) if step < len(pieces)]
        new = [PIECES[request][step] for request in batch]
        parts = [
            torch.cat(
                [own[request][done[request] : done[request] + count] for request, count in zip(batch, new)]
            )
            for own in inputs
        ]
        slots = torch.tensor([SLOTS[request] for request in batch])
        if step and max(new) == 1:
            out = tokens(*parts, pool, slots)
        else:
            starts = torch.tensor([0, *new]).cumsum(0)
            continues = torch.tensor([done[request] > 0 for request in batch])
            out = prompts(*parts, pool, slots, starts, continues)
        for request, count, own in zip(batch, new, out.split(new)):
            done[request] += count
            outputs[request].append(own)
    unused = sorted(set(range(len(pool))) - set(SLOTS))
    assert (pool[unused] == LEFT_BEHIND).all()
    return [torch.cat(own) for own in outputs]


def random(*shape):
    return [torch.randn(sum(pieces), *shape, dtype=torch.float64) for pieces in PIECES]


def recurrence(query, key, value, log_decay, beta):
    """Return the rule's output for one request, token by token."""

    def unit(x):
        return (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()).repeat_interleave(GROUPS, 1)

    query, key = unit(query) / KEY_DIM**0.5, unit(key)
    state, outputs = value.new_zeros(value.shape[1], VALUE_DIM, KEY_DIM), []
    for token in range(len(value)):
        state = state * log_decay[token].exp()[:, None, None]
        held = torch.einsum("hk,hvk->hv", key[token], state)
        state = state + torch.einsum("hk,hv->hvk", key[token], (value[token] - held) * beta[token][:, None])
        outputs.append(torch.einsum("hk,hvk->hv", query[token], state))
    return torch.stack(outputs)


@pytest.mark.parametrize("decay", [0.01, 1.0, 30.0])
def test_the_rule_in_pieces(decay):
    torch.manual_seed(3)
    heads = KEY_HEADS * GROUPS
    query, key, value = random(KEY_HEADS, KEY_DIM), random(KEY_HEADS, KEY_DIM), random(heads, VALUE_DIM)
    log_decay = [-decay * x.abs() for x in random(heads)]
    given = query, key, value, log_decay, [x.sigmoid() for x in random(heads)]
    pool = torch.full((9, heads, VALUE_DIM, KEY_DIM), LEFT_BEHIND)
    single = [[x.float() for x in own] for own in given]
    found = steps(delta_rule.extend, delta_rule.decode, pool, *single)
    for own, *inputs in zip(found, *given, strict=True):
        torch.testing.assert_close(own.double(), recurrence(*inputs), rtol=0, atol=1e-5)


def test_the_convolution_in_pieces():
    torch.manual_seed(4)
    weight, x = torch.randn(10, KERNEL, dtype=torch.float64), random(10)
    pool = torch.full((9, 10, KERNEL - 1), LEFT_BEHIND)

    def prompts(x, *where):
        return delta_rule.convolve_prompts(x, weight, *where)

    def tokens(x, *where):
        return delta_rule.convolve_tokens(x, weight, *where)

    for own, whole in zip(steps(prompts, tokens, pool, [one.float() for one in x]), x):
        padded = F.pad(whole.t(), (KERNEL - 1, 0))
        expected = F.silu(F.conv1d(padded[None], weight[:, None], groups=10)[0].t())
        torch.testing.assert_close(own.double(), expected, rtol=0, atol=1e-5)


def test_gates():
    a_log, alpha, beta, bias = torch.randn(4, 5, 6, dtype=torch.float64).unbind(0)
    log_decay, share = delta_rule.gates(a_log[0], alpha, beta, bias[0])
    expected = -a_log[0].exp() * (1 + (alpha + bias[0]).exp()).log()
    torch.testing.assert_close(log_decay.double(), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(share.double(), 1 / (1 + (-beta).exp()), rtol=1e-5, atol=1e-6)
