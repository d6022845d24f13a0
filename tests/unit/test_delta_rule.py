"""The gated delta rule and its convolution over packs, against plain recurrences and transformers."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from grpo_megatron.megatron.layers import fused_delta_rule
from grpo_megatron.megatron.layers.delta_rule import Chunks, causal_convolution, gated_delta_rule

NAMES = ("query", "key", "value", "log_decay", "beta")
PACKS = {
    "one token": (1,),
    "one sequence": (150,),
    "whole chunks": (64, 128, 64),
    "ragged": (150, 1, 64, 65, 7, 200, 3),
    "many short ones": (5,) * 30,
}
KEY_HEADS, GROUPS, KEY_DIM, VALUE_DIM = 2, 3, 16, 24


def problem(lengths, sharp=False) -> dict[str, torch.Tensor]:
    """Return the rule's inputs for a pack, and `grad`, the gradient of its output, in float64.

    sharp: some tokens forget nearly everything, others nearly nothing.
    """
    generator, count, heads = torch.Generator().manual_seed(7), sum(lengths), KEY_HEADS * GROUPS

    def random(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    decay = -random(count, heads).exp()
    if sharp:
        decay = torch.where(random(count, heads) > 0, 20 * decay, 0.01 * decay)
    return {
        "query": random(count, KEY_HEADS, KEY_DIM),
        "key": random(count, KEY_HEADS, KEY_DIM),
        "value": random(count, heads, VALUE_DIM),
        "log_decay": decay,
        "beta": random(count, heads).sigmoid(),
        "grad": random(count, heads, VALUE_DIM),
    }


def recurrence(query, key, value, log_decay, beta) -> torch.Tensor:
    """Return the rule's output for one sequence, token by token."""

    def unit(x):
        return (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()).repeat_interleave(GROUPS, 1)

    query, key = unit(query) / KEY_DIM**0.5, unit(key)
    state, outputs = value.new_zeros(value.shape[1], KEY_DIM, VALUE_DIM), []
    for token in range(len(value)):
        state = state * log_decay[token].exp()[:, None, None]
        held = torch.einsum("hd,hde->he", key[token], state)
        change = (value[token] - held) * beta[token][:, None]
        state = state + torch.einsum("hd,he->hde", key[token], change)
        outputs.append(torch.einsum("hd,hde->he", query[token], state))
    return torch.stack(outputs)


def by_sequence(rule, lengths, *inputs) -> torch.Tensor:
    return torch.cat([rule(*own) for own in zip(*(x.split(lengths) for x in inputs), strict=True)])


def with_gradients(rule, given: dict, dtype=torch.float64) -> dict[str, torch.Tensor]:
    """Return the output of `rule` and the gradients of its inputs, by name."""
    inputs = {name: given[name].to(dtype).clone().requires_grad_() for name in NAMES}
    output = rule(*inputs.values())
    output.backward(given["grad"].to(output.dtype))
    return {"output": output.detach()} | {name: x.grad for name, x in inputs.items()}


def packed(lengths, size=64):
    chunks = Chunks.of(np.array(lengths), torch.device("cpu"), size)
    return lambda *inputs: gated_delta_rule(*inputs, chunks)


def check(found: dict, expected: dict, tolerance: float) -> None:
    for name, value in expected.items():
        scale = max(1.0, float(value.abs().max()))
        torch.testing.assert_close(
            found[name].double(),
            value,
            rtol=0,
            atol=tolerance * scale,
            msg=lambda text, n=name: f"{n}: {text}",
        )


@pytest.mark.parametrize("size", [16, 64])
@pytest.mark.parametrize("lengths", PACKS.values(), ids=PACKS)
def test_values_and_gradients_equal_the_recurrence(lengths, size):
    given = problem(lengths)
    expected = with_gradients(lambda *inputs: by_sequence(recurrence, lengths, *inputs), given)
    check(with_gradients(packed(lengths, size), given), expected, 1e-12)
    check(with_gradients(packed(lengths, size), given, torch.float32), expected, 1e-5)


def test_float32_keeps_small_decays_beside_large_ones():
    """Sums of decays that are taken in float32 would be wrong by 1e-5."""
    lengths = (200,)
    rounded = {name: x.float().double() for name, x in problem(lengths, sharp=True).items()}
    expected = recurrence(*(rounded[name] for name in NAMES))
    found = with_gradients(packed(lengths), rounded, torch.float32)["output"]
    assert float((found - expected).abs().max()) < 1e-6


@pytest.mark.parametrize("lengths", PACKS.values(), ids=PACKS)
def test_each_sequence_equals_transformers(lengths):
    from transformers.models.qwen3_next import modeling_qwen3_next

    def theirs(query, key, value, log_decay, beta):
        query, key = (x.repeat_interleave(GROUPS, 1)[None] for x in (query, key))
        value, log_decay, beta = (x[None] for x in (value, log_decay, beta))
        return modeling_qwen3_next.torch_chunk_gated_delta_rule(
            query, key, value, g=log_decay, beta=beta, use_qk_l2norm_in_kernel=True
        )[0][0]

    inputs = [problem(lengths)[name].float() for name in NAMES]
    difference = packed(lengths)(*inputs) - by_sequence(theirs, lengths, *inputs)
    assert float(difference.abs().max()) < 1e-5


def test_bfloat16_is_computed_in_float32():
    given = {name: x.bfloat16() for name, x in problem((70, 9)).items()}
    expected = packed((70, 9))(*(given[name].float() for name in NAMES))
    found = packed((70, 9))(*(given[name] for name in NAMES))
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, expected.bfloat16())


def test_a_state_that_goes_on_at_a_boundary_is_noticed():
    """The comparisons above must notice it: the whole pack is computed as one sequence."""
    lengths = PACKS["ragged"]
    given = problem(lengths)
    expected = with_gradients(lambda *inputs: by_sequence(recurrence, lengths, *inputs), given)
    with pytest.raises(AssertionError, match="output"):
        check(with_gradients(packed((sum(lengths),)), given), expected, 1e-5)


def test_no_sequence_depends_on_another():
    lengths = PACKS["ragged"]
    given = problem(lengths)
    before = packed(lengths)(*(given[name] for name in NAMES))
    for name in NAMES:
        given[name][150:215] *= 0.5  # the second to the fourth sequence, and none else
    after = packed(lengths)(*(given[name] for name in NAMES))
    changed = [
        not torch.equal(*pair) for pair in zip(before.split(lengths), after.split(lengths), strict=True)
    ]
    assert changed == [False, True, True, False, False, False, False]


def test_chunks_are_ordered_by_depth():
    chunks = Chunks.of(np.array([3, 9, 5]), torch.device("cpu"), 4)
    assert chunks.counts == (3, 2, 1)
    # The longest sequence is first at each depth, then those with fewer chunks.
    firsts = {1: 0, 2: 4, 0: 8}
    assert chunks.places[[0, 3, 12]].tolist() == [firsts[0], firsts[1], firsts[2]]
    assert chunks.places[:3].tolist() == [8, 9, 10]
    assert chunks.places[3:12].tolist() == [0, 1, 2, 3, 12, 13, 14, 15, 20]
    assert chunks.places[12:].tolist() == [4, 5, 6, 7, 16]
    assert chunks.position_ids.tolist() == [*range(3), *range(9), *range(5)]
    values = torch.arange(17.0)
    assert torch.equal(chunks.taken(chunks.filled(values)), values)


CHANNELS, WIDTH = 6, 4


def plain_convolution(x, weight) -> torch.Tensor:
    """Return the convolution of one sequence, by torch's own function."""
    padded = F.pad(x.T, (WIDTH - 1, 0))
    return F.silu(F.conv1d(padded, weight[:, None], groups=CHANNELS)).T


@pytest.mark.parametrize("lengths", [(1,), (2, 3), (40, 1, 2, 3, 4, 17)])
def test_the_convolution_begins_anew_in_each_sequence(lengths):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(sum(lengths), CHANNELS, generator=generator, dtype=torch.float64)
    weight = torch.randn(CHANNELS, WIDTH, generator=generator, dtype=torch.float64)
    grad = torch.randn(sum(lengths), CHANNELS, generator=generator, dtype=torch.float64)
    chunks = Chunks.of(np.array(lengths), x.device)
    results = []
    for function in (
        lambda x, weight: causal_convolution(x, weight, chunks),
        lambda x, weight: torch.cat([plain_convolution(own, weight) for own in x.split(lengths)]),
    ):
        inputs = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
        output = function(*inputs)
        output.backward(grad)
        results.append((output.detach(), *(tensor.grad for tensor in inputs)))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


def test_a_convolution_that_goes_on_at_a_boundary_is_noticed():
    x, weight = torch.ones(7, CHANNELS), torch.ones(CHANNELS, WIDTH)
    apart = torch.cat([plain_convolution(own, weight) for own in x.split((4, 3))])
    two, one = (Chunks.of(np.array(lengths), x.device) for lengths in ([4, 3], [7]))
    assert torch.equal(causal_convolution(x, weight, two), apart)
    assert not torch.equal(causal_convolution(x, weight, one), apart)


def test_only_gpus_have_fused_kernels():
    assert not fused_delta_rule.fits(torch.ones(2, dtype=torch.bfloat16))
