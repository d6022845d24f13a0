"""The head against whole float64 logits: values, gradients, memory and collectives."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from grpo_megatron.model.parallel_sizes import ParallelSizes
from tests.parallel import heads
from tests.parallel.heads import Problem

LAYOUTS = {
    "tp1": ParallelSizes(),
    "tp2": ParallelSizes(tp=2),
    "tp2sp": ParallelSizes(tp=2, sequence_parallel=True),
}
# (tokens, words) of a tile; 5 does not divide 24, 7 does not divide 61 or 32.
TILES = {"default": (None, None), "5x7": (5, 7), "7x": (7, None), "x16": (None, 16), "1x61": (1, 61)}


def run(ranks, layout, problem):
    """Return the values, which every rank has, and whole gradients (the weight's with its padded rows)."""
    sizes = LAYOUTS[layout]
    results = ranks.run(heads.values_and_gradients, sizes, problem, sizes.sequence_parallel)
    found = {}
    for name in results[0]:
        parts = [result[name] for result in results]
        if name == "weight" or (name == "hidden" and sizes.sequence_parallel):
            found[name] = np.concatenate(parts)
        else:
            found[name] = parts[0]
            assert all(np.array_equal(parts[0], part) for part in parts), f"{name} differs between ranks"
    return found


def check(found, problem, names=("logp", "entropy", "kl", "hidden", "weight"), tolerance=1e-6):
    expected = heads.exact(problem)
    assert set(found) == set(names)
    for name in names:
        scale = max(1.0, float(expected[name].abs().max()))
        value = found[name][: problem.vocab_size] if name == "weight" else found[name]
        np.testing.assert_allclose(
            value, expected[name], rtol=10 * tolerance, atol=tolerance * scale, err_msg=name
        )
    if "weight" in names:
        assert not found["weight"][problem.vocab_size :].any(), "gradient in padded rows"


@pytest.mark.slow_when(
    lambda layout, tile: layout == "tp2" or (layout == "tp2sp" and tile not in ("default", "5x7"))
)
@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_values_and_gradients(ranks, layout, tile):
    chunk_tokens, chunk_vocab = TILES[tile]
    problem = Problem(chunk_tokens=chunk_tokens, chunk_vocab=chunk_vocab)
    check(run(ranks, layout, problem), problem)


@pytest.mark.parametrize(
    "use", [("logp",), ("entropy",), ("kl",), ("logp", "kl"), ("entropy", "kl")], ids="+".join
)
def test_gradient_of_some_outputs(ranks, use):
    problem = Problem(use=use, chunk_tokens=5, chunk_vocab=7)
    # The KL's gradient is small beside the log-ratios (about 10) that it is computed from. Their rounding
    # depends on the CPU.
    check(run(ranks, "tp2", problem), problem, tolerance=5e-6 if "kl" in use else 1e-6)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_without_reference(ranks, layout):
    problem = Problem(reference="none", use=("logp", "entropy"), temperature=1.0)
    check(run(ranks, layout, problem), problem, ("logp", "entropy", "hidden", "weight"))


@pytest.mark.parametrize("trained", ["hidden", "weight"])
def test_gradient_of_one_input(ranks, trained):
    problem = Problem(trained=(trained,))
    check(run(ranks, "tp2", problem), problem, ("logp", "entropy", "kl", trained))


def test_a_rank_that_holds_only_padding(ranks):
    problem = Problem(padded_vocab=128)  # the second rank's 64 rows are no words
    check(run(ranks, "tp2sp", problem), problem)


def test_identical_reference(ranks):
    problem = Problem(reference="same", use=("kl",), chunk_tokens=5)
    found = run(ranks, "tp2", problem)
    for name in ("kl", "hidden", "weight"):
        assert np.abs(found[name]).max() <= 1e-6, name
    different = run(ranks, "tp2", replace(problem, reference="other"))
    assert all(np.abs(different[name]).max() > 0.1 for name in ("kl", "hidden", "weight"))


@pytest.mark.parametrize("chunk_tokens", [None, 5])
def test_bf16_weights(ranks, chunk_tokens):
    problem = Problem(dtype=torch.bfloat16, chunk_tokens=chunk_tokens, chunk_vocab=7)
    check(run(ranks, "tp2", problem), problem, tolerance=2e-2)


def test_exact_logits(ranks):
    """bf16 weights leave only float32's error of the log-probs. With fp32 weights nothing changes."""
    rounded = Problem(dtype=torch.bfloat16, chunk_tokens=5, chunk_vocab=7)
    exact = replace(rounded, exact_logits=True)
    expected = heads.exact(exact)["logp"].numpy()
    error = np.abs(run(ranks, "tp2", exact)["logp"] - expected).max()
    assert error <= 1e-5 < 100 * error < np.abs(run(ranks, "tp2", rounded)["logp"] - expected).max()
    check(run(ranks, "tp2", exact), exact, tolerance=2e-2)
    whole = Problem(use=("logp", "kl"), exact_logits=True)
    found, same = run(ranks, "tp2", whole), run(ranks, "tp2", replace(whole, exact_logits=False))
    assert all(np.array_equal(found[name], same[name]) for name in found)


def test_bf16_gradient_of_the_weight_is_summed_in_float32(ranks):
    """A running sum in bf16 over 512 chunks would be off by several percent."""
    problem = Problem(tokens=512, dtype=torch.bfloat16, chunk_tokens=1, use=("logp",))
    chunked = run(ranks, "tp1", problem)["weight"][:61]
    expected = heads.exact(problem)["weight"].numpy()
    assert np.linalg.norm(chunked - expected) / np.linalg.norm(expected) < 5e-3


@pytest.mark.parametrize("main_dtype", [torch.float32, torch.bfloat16], ids=["main32", "main16"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    ("marked", "zero_out"), [(False, False), (True, False), (True, True)], ids=["bare", "ddp", "tied"]
)
def test_main_grad(ranks, dtype, main_dtype, marked, zero_out):
    problem = Problem(dtype=dtype, chunk_tokens=5, chunk_vocab=7)
    results = ranks.run(heads.accumulated, LAYOUTS["tp2"], problem, main_dtype, marked, zero_out)
    added = np.concatenate([result["main_grad"] for result in results])
    expected = heads.exact(problem)["weight"].numpy()
    tolerance = 1e-6 if dtype == main_dtype == torch.float32 else 2e-2
    assert np.linalg.norm(added[:61] - expected) <= tolerance * np.linalg.norm(expected)
    assert not added[61:].any()
    for result in results:
        assert (result["grad"] is None) == (not marked)
        assert not zero_out or not result["grad"].any()


def test_no_logits_of_all_tokens_and_words(ranks):
    problem = Problem(
        tokens=64, hidden_size=4, vocab_size=500, padded_vocab=512, chunk_tokens=8, chunk_vocab=32
    )
    whole = replace(problem, chunk_tokens=64, chunk_vocab=512)
    forward, backward = ranks.run(heads.recorded, LAYOUTS["tp1"], problem, False)[0]["largest"]
    assert max(forward, backward) <= 512 * 4  # the weight; t V is 32,000, a tile 256
    largest = ranks.run(heads.recorded, LAYOUTS["tp1"], whole, False)[0]["largest"]
    assert min(largest) == 64 * 500, "the recorder does not see the logits"


def test_a_pass_does_only_what_is_asked(ranks):
    """Matrix products with 2 x 2 tiles: one projection each in the forward pass, two or three more in the
    backward pass.
    """

    def counts(layout="tp1", **fields):
        problem = Problem(chunk_tokens=12, chunk_vocab=31, **fields)
        return ranks.run(heads.recorded, LAYOUTS[layout], problem, False)[0]

    assert counts()["products"] == (8, 16)
    assert counts(use=("logp", "entropy"))["products"] == (8, 12), "the reference is projected for nothing"
    assert counts(reference="none", use=("logp",))["products"] == (4, 12)
    assert counts(reference="none", use=("logp",), trained=("hidden",))["products"] == (4, 8)
    # MAX and SUM, however many tiles; backward: the sum of the hidden states' gradients.
    assert counts("tp2")["collectives"] == (2, 1)


def test_without_gradients(ranks):
    assert ranks.run(heads.evaluated, LAYOUTS["tp2"], Problem()) == [True, True]


def test_refusals(ranks):
    messages = ranks.run(heads.refusals, LAYOUTS["tp1"], Problem())[0]
    for message, part in zip(
        messages,
        [
            "temperature must be above 0",
            "24 hidden states for 23",
            "the reference's hidden states",
            "at least 1",
            "main_grad",
        ],
        strict=True,
    ):
        assert part in message


@pytest.mark.slow
def test_benchmark_runs_small():
    script = Path(__file__).resolve().parents[2] / "benchmarks" / "logprob.py"
    options = [
        "--hidden",
        "64",
        "--vocab",
        "20000",
        "--tokens-memory",
        "512",
        "--tokens-time",
        "128",
        "--repeats",
        "1",
    ]
    done = subprocess.run([sys.executable, script, *options], capture_output=True, text=True, check=True)
    result = json.loads(done.stdout.splitlines()[-1])
    assert set(result) == {"memory_ratio", "forward_ratio", "time_ratio", "max_error"}
    assert 0 < result["memory_ratio"] < 0.5
    assert 0 < result["max_error"] <= 1e-5
    assert min(result["forward_ratio"], result["time_ratio"]) > 0


@pytest.mark.parametrize("positions", [(0, 3, 4, 17, 23), (5,), tuple(range(24))], ids=["some", "one", "all"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_chosen_positions_have_the_values_and_gradients_of_the_whole(ranks, layout, positions):
    """Training computes the head for response tokens only, as if the loss of all others were multiplied by
    zero.
    """
    problem = Problem(chunk_tokens=5, chunk_vocab=7)
    sizes = LAYOUTS[layout]
    for chosen, whole in ranks.run(heads.of_positions, sizes, problem, sizes.sequence_parallel, positions):
        assert chosen.keys() == whole.keys() == {"logp", "entropy", "kl", "hidden", "weight"}
        for name, values in whole.items():
            np.testing.assert_allclose(
                chosen[name], values, rtol=1e-5, atol=1e-5 * max(1.0, np.abs(values).max()), err_msg=name
            )
