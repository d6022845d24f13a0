"""Line charts as SVG, for a page that must not load other files."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from grpo_megatron.monitoring.report.read import Curve
from grpo_megatron.monitoring.report.rendering import parts

# Paul Tol's "bright" scheme. People with any kind of colour vision can tell these colours apart.
COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#777777")

_WIDTH, _HEIGHT = 460, 220
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 10, 10, 28
# A curve with more points is thinned to the means of neighbours, because a screen cannot show more.
_MOST_POINTS = 400
# Larger values are not drawn. Sums and differences of values up to this one are finite.
_LARGEST = 1e300


@dataclass(frozen=True)
class Line:
    """One line of a line chart.

    label: name of the scalar, for the legend.
    curve: list of (step, value).
    dashed: True for a line of the other run in a comparison.
    """

    label: str
    curve: Curve
    dashed: bool = False


def line_chart(lines: Sequence[Line]) -> Markup:
    """Return a chart as SVG with both axes, followed by a legend of all lines as HTML.

    Values that are not finite, or too large to draw, are left out. If no value is left, a text replaces the
    chart.
    """
    curves = [_thinned([point for point in line.curve if abs(point[1]) < _LARGEST]) for line in lines]
    points = [point for curve in curves for point in curve]
    if not points:
        return parts.empty_chart()
    x_low, x_high = _range([x for x, _ in points])
    y_low, y_high = _range([y for _, y in points])
    ticks = nice_ticks(y_low, y_high)
    y_low, y_high = min(y_low, ticks[0]), max(y_high, ticks[-1])

    def across(x: float) -> float:
        return _LEFT + (x - x_low) / (x_high - x_low) * (_WIDTH - _LEFT - _RIGHT)

    def up(y: float) -> float:
        return _HEIGHT - _BOTTOM - (y - y_low) / (y_high - y_low) * (_HEIGHT - _TOP - _BOTTOM)

    colours = _colours(lines)
    last = {line.label: _number(line.curve[-1][1]) for line in reversed(lines) if line.curve}
    return parts.chart(
        width=_WIDTH,
        height=_HEIGHT,
        frame={"left": _LEFT, "right": _WIDTH - _RIGHT, "top": _TOP, "bottom": _HEIGHT - _BOTTOM},
        y_ticks=[(up(tick), _number(tick)) for tick in ticks],
        x_ticks=[(across(tick), f"{tick:.0f}") for tick in nice_ticks(x_low, x_high, whole=True)],
        paths=[
            {
                "colour": colours[line.label],
                "dashed": line.dashed,
                "points": [(across(x), up(y)) for x, y in curve],
                "tip": f"{line.label}: last {_number(curve[-1][1])} at step {curve[-1][0]:.0f}",
            }
            for line, curve in zip(lines, curves, strict=True)
            if curve
        ],
        legend=[(label, colour, last.get(label, "")) for label, colour in colours.items()],
    )


def _colours(lines: Sequence[Line]) -> dict[str, str]:
    """Return {label: colour}. If two runs are compared, a scalar has the same colour for both runs."""
    labels = dict.fromkeys(line.label for line in lines)
    return {label: COLOURS[index % len(COLOURS)] for index, label in enumerate(labels)}


def nice_ticks(low: float, high: float, whole: bool = False) -> list[float]:
    """Return about three to seven round numbers for the ticks of an axis from `low` to `high`.

    The distance between ticks is 1, 2 or 5 times a power of ten. The first tick is at or just below `low`,
    and the last at or just above `high`.

    whole: If True, return only integers, and none outside `low` to `high`.
    """
    raw = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * 0.999)
    if whole:
        step = max(1.0, round(step))
        return [tick * step for tick in range(math.ceil(low / step), math.floor(high / step) + 1)]
    return [tick * step for tick in range(math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9) + 1)]


def _range(values: list[float]) -> tuple[float, float]:
    """Return (smallest value, largest value) as the range of an axis, widened if the two are equal."""
    low, high = min(values), max(values)
    if high - low > 1e-12 * max(abs(low), abs(high)):
        return low, high
    margin = abs(low) / 10 or 1.0
    return low - margin, high + margin


def _thinned(curve: Curve) -> list[tuple[float, float]]:
    """Return the curve with at most _MOST_POINTS points. Each point is the mean of neighbouring points."""
    size = math.ceil(len(curve) / _MOST_POINTS)
    if size <= 1:
        return curve
    parts = [curve[start : start + size] for start in range(0, len(curve), size)]
    return [(sum(x for x, _ in part) / len(part), sum(y for _, y in part) / len(part)) for part in parts]


def _number(value: float) -> str:
    """Return a number as text with three significant digits, or from 1,000 to 1,000,000 as a whole number."""
    text = f"{value:.3g}"
    return f"{value:.0f}" if "e+" in text and abs(value) < 1e6 else text
