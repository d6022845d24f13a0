"""Metrics that know how they combine over micro-batches, ranks and optimizer steps.

Each class has three methods: `merge` combines two parts of a metric, `concrete` replaces tensors by Python
numbers, and `result` returns the final value.

A mean keeps numerator and denominator, because a mean of means over parts of unequal size is not the overall
mean. Values may be tensors on any device until the function `concrete` copies all of them to the host at
once. Copying one after the other would wait for the GPU each time.
"""

import math
from bisect import bisect_left
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch


def nan_max(a: float, b: float) -> float:
    """Return the larger of two numbers, or NaN if either is NaN.

    Python's max() returns NaN or the other number, depending on the order of the arguments.
    """
    return math.nan if math.isnan(a) or math.isnan(b) else max(a, b)


@dataclass(frozen=True)
class Mean:
    """Metric whose result is a mean, or NaN if the count is 0.

    The metric keeps total and count instead of the mean, so that two parts can be merged exactly.

    total: sum of the values, or of the weighted values
    count: number of values, or sum of their weights
    """

    total: Any
    count: Any

    def merge(self, other: "Mean") -> "Mean":
        return Mean(self.total + other.total, self.count + other.count)

    def concrete(self) -> "Mean":
        return Mean(float(self.total), float(self.count))

    def result(self) -> float:
        return float(self.total) / float(self.count) if float(self.count) else float("nan")


@dataclass(frozen=True)
class Std:
    """Metric whose result is a population standard deviation, or NaN if there are no values.

    The metric keeps three numbers, so that parts can be merged: the number of values (`count`), their sum
    (`total`), and the sum of their squares (`squares`).
    """

    count: Any
    total: Any
    squares: Any

    @classmethod
    def of(cls, values: torch.Tensor) -> "Std":
        """Create the metric of the standard deviation of `values` [n].

        The sums are in float64, because rounding in float32 could hide a small standard deviation.
        """
        values = values.detach().double()
        return cls(values.numel(), values.sum(), values.square().sum())

    def merge(self, other: "Std") -> "Std":
        return Std(self.count + other.count, self.total + other.total, self.squares + other.squares)

    def concrete(self) -> "Std":
        return Std(float(self.count), float(self.total), float(self.squares))

    def result(self) -> float:
        if not float(self.count):
            return math.nan
        mean = float(self.total) / float(self.count)
        return math.sqrt(max(0.0, float(self.squares) / float(self.count) - mean * mean))


@dataclass(frozen=True)
class Sum:
    value: Any

    def merge(self, other: "Sum") -> "Sum":
        return Sum(self.value + other.value)

    def concrete(self) -> "Sum":
        return Sum(float(self.value))

    def result(self) -> float:
        return float(self.value)


@dataclass(frozen=True)
class Max:
    value: Any

    def merge(self, other: "Max") -> "Max":
        return Max(nan_max(float(self.value), float(other.value)))

    def concrete(self) -> "Max":
        return Max(float(self.value))

    def result(self) -> float:
        return float(self.value)


@dataclass(frozen=True)
class Top:
    """Metric that keeps the k rows with the largest first column, such as the tokens of the largest mismatch.

    The result is a list of tuples, the largest first. NaN counts as larger than any number. `to_floats`
    leaves this metric out, because its result is not a scalar.

    rows: tensor [n, columns] or list of tuples; rows whose first column is -inf are left out
    k: largest number of rows in the result
    """

    rows: Any
    k: int = 5

    @classmethod
    def of(cls, rows: torch.Tensor, mask: torch.Tensor, k: int = 5) -> "Top":
        """Create the metric with the k rows that have the largest first column, of those whose mask is True.

        rows: [n, columns].
        mask: bool [n].
        """
        first = torch.where(mask, rows[:, 0], -torch.inf)
        chosen = first.topk(min(k, len(rows))).indices
        return cls(torch.cat([first[chosen, None], rows[chosen, 1:]], dim=1), k)

    def merge(self, other: "Top") -> "Top":
        rows = [*self.concrete().rows, *other.concrete().rows]
        rows.sort(key=lambda row: (math.inf if math.isnan(row[0]) else row[0], row), reverse=True)
        return Top(rows[: self.k], self.k)

    def concrete(self) -> "Top":
        rows = [tuple(row) for row in self.rows.tolist()] if torch.is_tensor(self.rows) else self.rows
        return Top([row for row in rows if row[0] != -math.inf], self.k)

    def result(self) -> list[tuple]:
        return self.concrete().rows


# Bin edges of log-ratios: logarithmic in size, 16 per decade, from 1e-6 to beyond 20, for either sign.
_SIZES = [10 ** (-6 + i / 16) for i in range(118)]
_EDGES = [*(-size for size in reversed(_SIZES)), *_SIZES]
_QUANTILES = {"p01": 0.01, "p50": 0.5, "p99": 0.99}


@cache
def _edges(device: torch.device) -> torch.Tensor:
    return torch.tensor(_EDGES, dtype=torch.float64, device=device)


@dataclass(frozen=True)
class RatioQuantiles:
    """Metric whose results are the 1 %, 50 % and 99 % quantiles of probability ratios.

    The quantiles are estimated from a histogram of log-ratios, because histograms of several ranks can be
    merged. The logarithm of an estimate has an error of at most 8 %, or of at most 1e-6 for exact logarithms
    between -1e-6 and 1e-6. Logarithms beyond +-20 count as about +-20, and NaN counts as about 20.

    counts: int64 [number of bins], the number of log-ratios in each bin of the histogram.
    """

    counts: Any

    @classmethod
    def of(cls, log_ratio: torch.Tensor, mask: torch.Tensor) -> "RatioQuantiles":
        """Create the metric from the log-ratios whose mask is True.

        log_ratio: float [n], natural logarithms of probability ratios.
        mask: bool [n].
        """
        bins = torch.bucketize(log_ratio.double(), _edges(log_ratio.device))
        counts = torch.zeros(len(_EDGES) + 1, dtype=torch.int64, device=log_ratio.device)
        return cls(counts.index_add_(0, bins, mask.long()))

    def merge(self, other: "RatioQuantiles") -> "RatioQuantiles":
        pairs = zip(self.concrete().counts, other.concrete().counts, strict=True)
        return RatioQuantiles([own + theirs for own, theirs in pairs])

    def concrete(self) -> "RatioQuantiles":
        return self if isinstance(self.counts, list) else RatioQuantiles(self.counts.tolist())

    def result(self) -> dict[str, float]:
        """Return {"p01": ratio, "p50": ratio, "p99": ratio}. The ratios are NaN if there are no values."""
        sums = torch.tensor(self.concrete().counts).cumsum(0).tolist()
        if not sums[-1]:
            return dict.fromkeys(_QUANTILES, math.nan)
        found = {
            name: bisect_left(sums, max(1, math.ceil(share * sums[-1]))) for name, share in _QUANTILES.items()
        }
        return {name: math.exp(_bin_centre(index)) for name, index in found.items()}


def _bin_centre(index: int) -> float:
    if index in (0, len(_EDGES)):
        return _EDGES[0 if index == 0 else -1]
    return (_EDGES[index - 1] + _EDGES[index]) / 2


Metric = Mean | Std | Sum | Max | Top | RatioQuantiles
Metrics = dict[str, Metric]


def concrete(parts: list[Metrics]) -> list[Metrics]:
    """Replace tensors in metrics by Python numbers, so that a rank can send the metrics to another process.

    All tensors are copied to the host at once. Copying one by one would wait for the GPU each time.

    parts: any number of dicts {name: metric}. The result has one converted dict for each, in the same order.
    """
    values = [value for part in parts for metric in part.values() for value in vars(metric).values()]
    numbers = iter(_numbers([value for value in values if torch.is_tensor(value)]))

    def of(metric: Metric) -> Metric:
        fields = {
            name: next(numbers) if torch.is_tensor(value) else value for name, value in vars(metric).items()
        }
        return type(metric)(**fields).concrete()

    return [{name: of(metric) for name, metric in part.items()} for part in parts]


def _numbers(tensors: list[torch.Tensor]) -> list:
    """Convert each tensor to a number or nested lists of numbers, with a single copy to the host in all."""
    if not tensors:
        return []
    # In float64 every count is exact.
    flat = torch.cat([tensor.detach().flatten().double() for tensor in tensors]).cpu().numpy()
    parts = np.split(flat, np.cumsum([tensor.numel() for tensor in tensors])[:-1])
    return [
        part.astype(np.float64 if tensor.is_floating_point() else np.int64)
        .reshape(tuple(tensor.shape))
        .tolist()
        for part, tensor in zip(parts, tensors, strict=True)
    ]


def merge(parts: list[Metrics]) -> Metrics:
    """Combine the metrics of several micro-batches, ranks or optimizer steps into one dict {name: metric}.

    Metrics of the same name are combined by their `merge` methods.
    """
    merged: Metrics = {}
    for part in parts:
        for name, metric in part.items():
            merged[name] = merged[name].merge(metric) if name in merged else metric
    return merged


def to_floats(metrics: Metrics) -> dict[str, float]:
    """Return the results of the metrics as scalars, {name: value}.

    A RatioQuantiles metric becomes three scalars: NAME_p01, NAME_p50 and NAME_p99. A Top metric is left out,
    because its result is a list of rows.
    """
    floats = {}
    for name, metric in metrics.items():
        if isinstance(metric, RatioQuantiles):
            floats |= {f"{name}_{quantile}": value for quantile, value in metric.result().items()}
        elif not isinstance(metric, Top):
            floats[name] = metric.result()
    return floats
