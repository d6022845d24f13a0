"""Metrics that know how they combine over micro-batches, ranks and optimizer steps.

A mean carries numerator and denominator, because a mean of means over unequal parts is not the
mean. Values may be 0-d tensors until `to_floats` (one host synchronisation at the end).
"""

import math
from dataclasses import dataclass
from typing import Any


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


Metric = Mean | Sum | Max
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
    return {name: metric.result() for name, metric in metrics.items()}
