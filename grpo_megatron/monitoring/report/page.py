"""HTML page about a run. Style and charts are part of the page, so that it can be mailed and opened anywhere.

The templates escape all text that the run wrote, because prompts and responses may contain HTML.
"""

from collections.abc import Callable
from typing import Any

from markupsafe import Markup

from grpo_megatron.monitoring.charts import charts_of
from grpo_megatron.monitoring.report import rendering
from grpo_megatron.monitoring.report.chart import Line, line_chart
from grpo_megatron.monitoring.report.idle import busy_shares
from grpo_megatron.monitoring.report.read import RecordedRun
from grpo_megatron.monitoring.report.rendering import parts
from grpo_megatron.monitoring.report.trees import chosen_for_page, trees

# Number of texts that a section shows, and the smallest number for each name in it. Without this minimum, the
# last name would hide the others, because a section may have several groups in a step, or several data sets.
_TEXTS, _TEXTS_OF_A_NAME = 4, 2
_NO_PHASES = ("time/step", "time/monitor")

# {key: (value in this run, value in the other run)} of the configurations, as text.
Changes = dict[str, tuple[str, str]]


def page(run: RecordedRun, other: RecordedRun | None = None, changes: Changes | str = "") -> str:
    """Return an HTML page about a run, with its results, curves, phases, samples and configuration.

    other: a run to compare with, whose curves are drawn dashed; None: no comparison.
    changes: {key: (value in `run`, value in `other`)} of the configuration keys that differ, or a sentence
        that says why the configurations cannot be compared.
    """
    sections = [("Result", _results(run, other))]
    if other:
        sections.append((f"What differs from {other.name}", _changes(changes, run.name, other.name)))
    names = list(dict.fromkeys([*run.curves, *(other.curves if other else ())]))
    for section, charts in charts_of(names).items():
        drawn = [(title, _chart(shown, run, other)) for title, shown in charts.items()]
        sections.append((section, parts.charts(drawn)))
    sections += [
        ("Where the time goes", _phases(run)),
        (
            "Tokens that engine and trainer disagree about most",
            _texts(run, lambda name: name == "mismatch/worst"),
        ),
        ("Trajectories", trees(*chosen_for_page(run.trajectories))),
        ("Samples", _texts(run, lambda name: name.startswith("samples/"))),
        ("Samples of evaluations", _first_and_last_texts(run, lambda name: name.startswith("eval/"))),
        ("Configuration", parts.verbatim(run.config) if run.config else parts.nothing()),
    ]
    title = f"{run.name} against {other.name}" if other else run.name
    return rendering.page.render(title=title, run=run, sections=sections)


def _chart(names: list[str], run: RecordedRun, other: RecordedRun | None) -> Markup:
    lines = [Line(name, run.curves[name]) for name in names if name in run.curves]
    if other:
        lines += [Line(name, other.curves[name], dashed=True) for name in names if name in other.curves]
    return line_chart(lines)


def _results(run: RecordedRun, other: RecordedRun | None) -> Markup:
    """Return an HTML table with the first and last values of evaluations, reward and SFT loss.

    other: a run to compare with, whose last values are shown too; None: no comparison.
    """
    names = [
        name
        for name in run.curves
        if name.startswith("eval/") or name in ("reward/mean", "sft/loss_per_token")
    ]
    if not names:
        return parts.nothing()
    head = ["", "first", "last"] + ([f"last of {other.name}"] if other else [])
    rows = []
    for name in names:
        values = [run.curves[name][0][1], run.curves[name][-1][1]]
        cells = [f"{value:.4g}" for value in values]
        if other:
            cells.append(f"{other.curves[name][-1][1]:.4g}" if name in other.curves else "")
        rows.append([name, *cells])
    return parts.table(head, rows)


def _changes(changes: Changes | str, name: str, other: str) -> Markup:
    if isinstance(changes, str):
        return parts.sentence(changes)
    if not changes:
        return parts.sentence("Both have the same configuration.")
    return parts.table(["key", name, other], [[key, *sides] for key, sides in changes.items()])


def _phases(run: RecordedRun) -> Markup:
    """Return HTML about the time of a step: a bar for each phase, with mean seconds and share of the step.

    The bars are followed by a sentence about the time of monitoring and a table of idle shares. If the run
    has recorded no step times, the HTML says only that there is nothing to show.
    """
    found = {
        name.removeprefix("time/"): curve for name, curve in run.curves.items() if name.startswith("time/")
    }
    if not run.curves.get("time/step"):
        return parts.nothing()
    steps = run.curves["time/step"]
    whole = sum(value for _, value in steps)
    shares = {
        name: sum(value for _, value in curve)
        for name, curve in found.items()
        if f"time/{name}" not in _NO_PHASES
    }
    longest = max(shares.values(), default=0.0)
    rows = [
        (name, max(0.0, total) / longest, f"{total / len(steps):.3f} s a step, {100 * total / whole:.1f}%")
        for name, total in sorted(shares.items(), key=lambda item: -item[1])
    ]
    monitoring = found.get("monitor")
    note = ""
    if monitoring:
        spent = sum(value for _, value in monitoring)
        note = (
            f"Monitoring took {1000 * spent / len(monitoring):.1f} ms a step, "
            f"{100 * spent / whole:.2f}% of it."
        )
    return parts.times(rows, note, _idle(run))


def _idle(run: RecordedRun) -> tuple[list[str], list[list[str]]] | None:
    """Return a table, as (head, rows), of the idle shares of ranks, engines and workers per driver phase.

    Returns None if only the driver recorded phases.
    """
    shares = busy_shares(run.timeline)
    if not shares:
        return None
    roles = list(next(iter(shares.values())))
    rows = [
        [phase, *(f"{100 * (1 - found[role]):.1f}%" for role in roles)] for phase, found in shares.items()
    ]
    return ["phase", *(f"{role}, mean" for role in roles)], rows


def _texts(run: RecordedRun, wanted: Callable[[str], bool]) -> Markup:
    """Return HTML with the last few texts that the run logged under each wanted name, newest steps first.

    wanted: function that returns True for the names to show, such as names that begin with `samples/`.
    """
    named = _by_name(run, wanted)
    most = max(_TEXTS // max(1, len(named)), _TEXTS_OF_A_NAME)
    shown = [row for rows in named.values() for row in rows[-most:]]
    return _shown(sorted(shown, key=lambda row: -row["step"]))


def _first_and_last_texts(run: RecordedRun, wanted: Callable[[str], bool]) -> Markup:
    """Return HTML with the first and the last text that the run logged under each wanted name.

    A reader can thus compare the texts before and after training.

    wanted: function that returns True for the names to show.
    """
    return _shown([row for rows in _by_name(run, wanted).values() for row in (rows[:1] + rows[1:][-1:])])


def _by_name(run: RecordedRun, wanted: Callable[[str], bool]) -> dict[str, list[dict[str, Any]]]:
    named: dict[str, list[dict[str, Any]]] = {}
    for row in run.texts:
        if wanted(row["name"]):
            named.setdefault(row["name"], []).append(row)
    return named


def _shown(rows: list[dict[str, Any]]) -> Markup:
    return parts.texts(rows) if rows else parts.nothing()
