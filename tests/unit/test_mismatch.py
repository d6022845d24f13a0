import math
import re
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from grpo_megatron.algorithm.mismatch import (
    ids_as_text,
    in_context,
    measure_mismatch,
    mismatch_metrics,
    mismatch_report,
    with_tokens,
)
from grpo_megatron.batch.sample import Sample
from grpo_megatron.batch.train_batch import TrainBatch
from grpo_megatron.config.schema import Config
from grpo_megatron.metrics import Max, Mean, Top, concrete, merge, to_floats
from tests.unit.ragged import ragged


def metrics_of(delta, mask=None):
    logp = torch.tensor(delta, dtype=torch.float64)
    mask = torch.ones(len(delta), dtype=torch.bool) if mask is None else torch.tensor(mask)
    return mismatch_metrics(torch.zeros_like(logp), logp, mask, torch.arange(len(delta)) + 2**40)


# --- measuring


def test_by_hand_and_on_trained_tokens_only():
    metrics = metrics_of([0.5, -0.1, 9.0], [True, True, False])
    scalars = to_floats(metrics)
    assert scalars["mismatch/max"] == 0.5
    assert scalars["mismatch/mean"] == pytest.approx(0.3)
    assert scalars["mismatch/k3"] == pytest.approx((math.exp(0.5) - 1.5 + math.exp(-0.1) - 0.9) / 2)
    assert [row[:2] for row in metrics["mismatch/worst"].result()] == [(0.5, 2**40), (0.1, 2**40 + 1)]


def test_it_is_the_trainers_log_prob_less_the_engines():
    """The sign determines k3 and the quantiles of the ratio."""
    engine, trainer = torch.tensor([-1.0, -3.0]).double(), torch.tensor([-1.5, -3.0]).double()
    metrics = mismatch_metrics(engine, trainer, torch.tensor([True, True]), torch.tensor([4, 5]))
    scalars = to_floats(metrics)
    assert (scalars["mismatch/max"], scalars["mismatch/mean"]) == (0.5, 0.25)
    assert scalars["mismatch/k3"] == pytest.approx((math.exp(-0.5) + 0.5 - 1) / 2)
    assert math.log(scalars["mismatch/ratio_p01"]) == pytest.approx(-0.5, rel=0.08)
    assert metrics["mismatch/worst"].result()[0] == (0.5, 4, -1.0, -1.5)


def test_tokens_of_older_weights_have_metrics_of_their_own():
    """A change of the policy is no mismatch. The worst tokens of a mismatch are current ones."""
    engine, trainer = torch.zeros(6).double(), torch.tensor([0.1, -0.2, 3.0, 0.5, 2.0, -1.0]).double()
    mask, age = torch.tensor([True, True, False, True, True, True]), torch.tensor([0, 1, 0, 1, 4, 7])
    metrics = mismatch_metrics(engine, trainer, mask, torch.arange(6), age)
    scalars = to_floats(with_tokens(*concrete([metrics])))
    assert scalars["mismatch/max"] == scalars["mismatch/mean"] == pytest.approx(0.1)
    assert [row[1] for row in metrics["mismatch/worst"].result()] == [0]
    assert scalars["staleness/logprob_max"] == 2
    assert scalars["staleness/logprob_mean"] == pytest.approx((0.2 + 0.5 + 2 + 1) / 4)
    first = (1 - math.exp(-0.2) + math.exp(0.5) - 1) / 2
    assert scalars["staleness/ratio_change_age_1"] == pytest.approx(first)
    oldest = (math.exp(2) - 1 + 1 - math.exp(-1)) / 2
    assert scalars["staleness/ratio_change_age_4"] == pytest.approx(oldest)
    assert not {"staleness/ratio_change_age_2", "staleness/ratio_change_age_3"} & scalars.keys()


def test_without_current_tokens_there_is_no_mismatch():
    trainer, mask = torch.tensor([0.5]).double(), torch.tensor([True])
    metrics = mismatch_metrics(torch.zeros(1), trainer, mask, torch.arange(1), torch.tensor([2]))
    found = with_tokens(*concrete([metrics]))
    assert {name.partition("/")[0] for name in found} == {"staleness"}
    assert with_tokens({"other": Mean(0.0, 0.0)}).keys() == {"other"}


@pytest.mark.parametrize("delta", [21.0, 1000.0])
def test_a_difference_beyond_twenty_nats_leaves_k3_finite(delta):
    assert to_floats(metrics_of([delta]))["mismatch/k3"] == pytest.approx(math.expm1(20) - 20)
    assert to_floats(metrics_of([-delta]))["mismatch/k3"] == pytest.approx(math.expm1(-20) + 20)


def test_a_mismatch_that_is_nan_shows():
    assert math.isnan(to_floats(metrics_of([0.0, math.nan]))["mismatch/max"])
    assert math.isnan(metrics_of([0.0, math.nan, 3.0])["mismatch/worst"].result()[0][0])


def test_nothing_trained():
    scalars = to_floats(metrics_of([1.0], [False]))
    assert math.isnan(scalars["mismatch/ratio_p50"])
    assert scalars["mismatch/max"] == 0


@given(st.lists(st.floats(-15, 15), min_size=1, max_size=60), st.integers(1, 5))
def test_quantiles_and_worst_tokens_do_not_depend_on_how_tokens_are_divided(delta, parts):
    delta = np.round(delta, 4)
    pieces = [part for part in np.array_split(np.arange(len(delta)), parts) if len(part)]
    merged = merge(
        concrete(
            [
                mismatch_metrics(
                    torch.zeros(len(p), dtype=torch.float64),
                    torch.from_numpy(delta[p]),
                    torch.ones(len(p), dtype=torch.bool),
                    torch.from_numpy(p),
                )
                for p in pieces
            ]
        )
    )
    ordered = np.sort(delta)
    for name, share in (("p01", 0.01), ("p50", 0.5), ("p99", 0.99)):
        exact = ordered[max(1, math.ceil(share * len(delta))) - 1]
        assert math.log(to_floats(merged)[f"mismatch/ratio_{name}"]) == pytest.approx(
            exact, rel=0.08, abs=1e-6
        )
    worst = [row[0] for row in merged["mismatch/worst"].result()]
    assert worst == sorted(np.abs(delta).tolist(), reverse=True)[:5]


def described(row, tokens, cu_seqlens, decode) -> str:
    """Return the report's line about one row of mismatch/worst, of tokens in two micro-batches."""
    batches = []
    for start, end in pairwise(cu_seqlens):
        ids = np.array(tokens[start:end], np.int32)
        masks = np.ones(len(ids) - 1, bool), np.zeros(len(ids) - 1, np.float32)
        trajectory = 30 + len(batches)
        sample = Sample.of(0, trajectory, ids[:1], ids[1:], *masks, "stop")
        batches.append(TrainBatch.from_samples([sample]))
    metrics = in_context({"mismatch/max": Max(row[0]), "mismatch/worst": Top([row])}, batches)
    return mismatch_report(metrics, Config().mismatch, decode).worst


def test_the_worst_tokens_in_their_context():
    def decode(ids):
        return "".join(f"<{i}>" for i in ids)

    line = described((2.0, 5.0, -1.0, -3.0), np.arange(10, 20), [0, 4, 10], decode)
    expected = "|delta| 2 (engine -1.0000, trainer -3.0000), token 2 of 6 in trajectory 31: "
    assert line == expected + "'<14><15>>><16><<<17><18><19>'"


def test_worst_tokens_at_both_ends_of_a_sequence_show_no_token_of_the_neighbours():
    tokens, cu_seqlens = np.arange(10, 24), [0, 4, 14]
    first = described((2.0, 4.0, -1.0, -3.0), tokens, cu_seqlens, str)
    assert first.endswith("token 1 of 10 in trajectory 31: '[14]>>[15]<<[16 17 18 19 20 21]'")
    last = described((1.0, 12.0, -1.0, -2.0), tokens, cu_seqlens, str)
    assert last.endswith("token 9 of 10 in trajectory 31: '[14 15 16 17 18 19 20 21 22]>>[23]<<[]'")
    wide = described(
        (2.0, 18.0, -1.0, -3.0), np.arange(100, 140), [0, 4, 40], lambda ids: f"{ids[0]}-{ids[-1]}"
    )
    assert wide.endswith("'107-118>>119-119<<120-125'")  # twelve before and six after


@pytest.mark.parametrize(
    ("action", "says", "stops"),
    [("off", False, False), ("warn", True, False), ("mask", False, False), ("stop", True, True)],
)
def test_what_is_done_about_it(action, says, stops):
    given = ragged(4, spread=0.5)
    batch = given.batch
    batch.tokens = np.arange(batch.num_tokens) + 100
    config = Config().mismatch
    metrics = measure_mismatch([batch])
    largest = metrics["mismatch/max"].result()
    config.action, config.threshold = type(config.action)(action), largest * 0.99
    report = mismatch_report(metrics, config, ids_as_text)
    assert (bool(report.text), report.stop) == (says, stops)
    config.threshold = largest * 1.01
    report = mismatch_report(metrics, config, ids_as_text)
    assert (report.text, report.stop) == ("", False)
    config.threshold = largest
    assert not mismatch_report(metrics, config, ids_as_text).text
    rows = metrics["mismatch/worst"].result()
    assert all(f">>{row.token}<<" in line for row, line in zip(rows, report.worst.splitlines(), strict=True))
    assert all(re.search(r": '[\d ]*>>\d+<<[\d ]*'$", line) for line in report.worst.splitlines())
