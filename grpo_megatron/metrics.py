"""Metrics that know how they combine over micro-batches, ranks and optimizer steps.

A mean carries numerator and denominator, because a mean of means over unequal parts is not the
mean. Values may be 0-d tensors until `to_floats` (one host synchronisation at the end).
"""

import math
from bisect import bisect_left
from dataclasses import dataclass
from typing import Any

import torch


def nan_max(a: float, b: float) -> float:
    """max() that never hides a NaN, as Python's does depending on the order."""
    return math.nan if math.isnan(a) or math.isnan(b) else max(a, b)


@dataclass(frozen=True)
class Mean:
    total: Any
    count: Any

    def merge(self, other: "Mean") -> "Mean":
        return Mean(self.total + other.total, self.count + other.count)

    def concrete(self) -> "Mean":
        return Mean(float(self.total), float(self.count))

    def result(self) -> float:
        return float(self.total) / float(self.count) if float(self.count) else float("nan")


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
    """The k rows with the greatest first number, of all that were seen; for people, not a scalar."""

    rows: Any
    k: int = 5

    @classmethod
    def of(cls, rows: torch.Tensor, k: int = 5) -> "Top":
        """rows: [n, columns]."""
        return cls(rows[rows[:, 0].topk(min(k, len(rows))).indices], k)

    def merge(self, other: "Top") -> "Top":
        rows = [*self.concrete().rows, *other.concrete().rows]
        rows.sort(key=lambda row: (math.inf if math.isnan(row[0]) else row[0], row), reverse=True)
        return Top(rows[: self.k], self.k)

    def concrete(self) -> "Top":
        return self if isinstance(self.rows, list) else Top([tuple(row) for row in self.rows.tolist()], self.k)

    def result(self) -> list[tuple]:
        return self.concrete().rows


# Bins of log-ratios: logarithmic in their size, 16 a decade, from 1e-6 to beyond 20, for either sign.
_SIZES = [10 ** (-6 + i / 16) for i in range(118)]
_EDGES = [*(-size for size in reversed(_SIZES)), *_SIZES]
_QUANTILES = {"p01": 0.01, "p50": 0.5, "p99": 0.99}


@dataclass(frozen=True)
class RatioQuantiles:
    """Quantiles of a ratio, from a histogram of its logarithm; that within 8% of its size, or 1e-6.

    counts [number of bins]. NaN counts as infinitely large.
    """

    counts: Any

    @classmethod
    def of(cls, log_ratio: torch.Tensor) -> "RatioQuantiles":
        edges = torch.tensor(_EDGES, dtype=torch.float64, device=log_ratio.device)
        return cls(torch.bincount(torch.bucketize(log_ratio.double(), edges), minlength=len(_EDGES) + 1))

    def merge(self, other: "RatioQuantiles") -> "RatioQuantiles":
        pairs = zip(self.concrete().counts, other.concrete().counts, strict=True)
        return RatioQuantiles([own + theirs for own, theirs in pairs])

    def concrete(self) -> "RatioQuantiles":
        return self if isinstance(self.counts, list) else RatioQuantiles(self.counts.tolist())

    def result(self) -> dict[str, float]:
        """{name of the quantile: ratio}; NaN of nothing."""
        sums = torch.tensor(self.concrete().counts).cumsum(0).tolist()
        if not sums[-1]:
            return dict.fromkeys(_QUANTILES, math.nan)
        found = {name: bisect_left(sums, max(1, math.ceil(share * sums[-1]))) for name, share in _QUANTILES.items()}
        return {name: math.exp(_bin_centre(index)) for name, index in found.items()}


def _bin_centre(index: int) -> float:
    if index in (0, len(_EDGES)):
        return _EDGES[0 if index == 0 else -1]
    return (_EDGES[index - 1] + _EDGES[index]) / 2


Metric = Mean | Sum | Max | Top | RatioQuantiles
Metrics = dict[str, Metric]


def concrete(metrics: Metrics) -> Metrics:
    """The same metrics with Python floats in place of tensors."""
    return {name: metric.concrete() for name, metric in metrics.items()}


def merge(parts: list[Metrics]) -> Metrics:
    """Combine metrics of several micro-batches, ranks or steps; each by its own rule."""
    merged: Metrics = {}
    for part in parts:
        for name, metric in part.items():
            merged[name] = merged[name].merge(metric) if name in merged else metric
    return merged


def to_floats(metrics: Metrics) -> dict[str, float]:
    """The scalars among the metrics; quantiles as NAME_QUANTILE."""
    floats = {}
    for name, metric in metrics.items():
        if isinstance(metric, RatioQuantiles):
            floats |= {f"{name}_{quantile}": value for quantile, value in metric.result().items()}
        elif not isinstance(metric, Top):
            floats[name] = metric.result()
    return floats
