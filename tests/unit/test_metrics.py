import math

import pytest

from grpo_megatron.metrics import Max, Mean, Sum, merge, to_floats


@pytest.mark.parametrize("values", [(math.nan, 1.0), (1.0, math.nan)])
def test_a_maximum_never_hides_a_nan(values):
    merged = merge([{"a": Max(value)} for value in values])
    assert math.isnan(to_floats(merged)["a"])


def test_metrics_combine_by_their_own_rules():
    merged = merge([{"a": Mean(1.0, 1), "b": Max(3.0), "c": Sum(1.0)}, {"a": Mean(0.0, 3), "b": Max(2.0), "c": Sum(2.0)}])
    assert to_floats(merged) == {"a": 0.25, "b": 3.0, "c": 3.0}
