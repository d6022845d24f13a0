import math

import pytest
import torch

from grpo_megatron.metrics import Max, Mean, RatioQuantiles, Sum, Top, concrete, merge, to_floats
from tests.host_syncs import HostSyncs


@pytest.mark.parametrize("values", [(math.nan, 1.0), (1.0, math.nan)])
def test_a_maximum_never_hides_a_nan(values):
    merged = merge([{"a": Max(value)} for value in values])
    assert math.isnan(to_floats(merged)["a"])


def test_metrics_combine_by_their_own_rules():
    merged = merge(
        [{"a": Mean(1.0, 1), "b": Max(3.0), "c": Sum(1.0)}, {"a": Mean(0.0, 3), "b": Max(2.0), "c": Sum(2.0)}]
    )
    assert to_floats(merged) == {"a": 0.25, "b": 3.0, "c": 3.0}


def test_all_values_come_to_the_host_in_one_copy():
    many, mask = 2**40 + 1, torch.tensor([True, False, True])
    values = torch.tensor([0.5, 9.0, math.nan])
    part = {
        "mean": Mean(values[0], torch.tensor(many)),
        "sum": Sum(values[1]),
        "max": Max(values[2]),
        "ratio": RatioQuantiles.of(values, mask),
        "top": Top.of(torch.stack([values, values], dim=1), mask),
        "number": Mean(1.0, 2),
    }
    with HostSyncs() as syncs:
        found = concrete([part, {}, {"sum": Sum(values[0])}])
    assert [text.partition(":")[0] for text in syncs.found] == ["Tensor.cpu", "Tensor.numpy"]
    assert found[0]["mean"] == Mean(0.5, many)
    assert found[0]["number"] == Mean(1.0, 2)
    assert (found[0]["sum"].value, found[2]["sum"].value) == (9.0, 0.5)
    assert math.isnan(found[0]["max"].value)
    assert sum(found[0]["ratio"].counts) == 2
    assert [row[1] for row in found[0]["top"].rows][1:] == [0.5]
    assert found[1] == {}
