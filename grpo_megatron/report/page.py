"""HTML page about a run. Style and charts are inside it, so that it can be mailed and opened anywhere.

All text that the run wrote is escaped, because prompts and responses may contain HTML.
"""

from collections.abc import Callable
from html import escape
from typing import Any

from grpo_megatron.monitoring.charts import charts_of
from grpo_megatron.report.chart import Line, line_chart, share_bars
from grpo_megatron.report.idle import busy_shares
from grpo_megatron.report.read import RecordedRun

# Number of texts that a section shows, and the smallest number for each name in it. Without the second, the
# last name would hide the others, because a section may have several groups in a step, or several data sets.
_TEXTS, _TEXTS_OF_A_NAME = 4, 2
_NO_PHASES = ("time/step", "time/monitor")

# {key: (value in this run, value in the other run)} of the configurations, as text.
Changes = dict[str, tuple[str, str]]


def page(run: RecordedRun, other: RecordedRun | None = None, changes: Changes | str = "") -> str:
    """Return an HTML page about a run.

    other: a run to compare with. Its curves are drawn dashed.
    changes: keys whose values differ between the two configurations, or a text that says why they are not
        known.
    """
    against = f" against {other.name}" if other else ""
    parts = [
        f"<h1>{escape(run.name)}{escape(against)}</h1>",
        f"<p>{escape(str(run.folder))}, {run.steps} steps</p>",
    ]
    sections = [("Result", _results(run, other))]
    if other:
        sections.append((f"What differs from {other.name}", _changes(changes, run.name, other.name)))
    names = list(dict.fromkeys([*run.curves, *(other.curves if other else ())]))
    for section, charts in charts_of(names).items():
        drawn = [_chart(title, shown, run, other) for title, shown in charts.items()]
        sections.append((section, f'<div class="charts">{"".join(drawn)}</div>'))
    sections += [
        ("Where the time goes", _phases(run)),
        (
            "Tokens that engine and trainer disagree about most",
            _texts(run, lambda name: name == "mismatch/worst"),
        ),
        ("Samples", _texts(run, lambda name: name.startswith("samples/"))),
        ("Samples of evaluations", _first_and_last_texts(run, lambda name: name.startswith("eval/"))),
        ("Configuration", f"<pre>{escape(run.config)}</pre>" if run.config else _none()),
    ]
    links = [f'<a href="#s{number}">{escape(title)}</a>' for number, (title, _) in enumerate(sections)]
    parts.append(f"<nav>{' '.join(links)}</nav>")
    parts += [
        f'<h2 id="s{number}">{escape(title)}</h2>{body}' for number, (title, body) in enumerate(sections)
    ]
    title = escape(f"{run.name}{against}")
    head = (
        '<meta charset="utf-8"><meta http-equiv="Content-Security-Policy" '
        f'content="{_POLICY}"><title>{title}</title>'
    )
    return (
        "<!DOCTYPE html><html "
        f"lang=en><head>{head}<style>{_STYLE}</style></head><body>{''.join(parts)}</body></html>\n"
    )


def _chart(title: str, names: list[str], run: RecordedRun, other: RecordedRun | None) -> str:
    lines = [Line(name, run.curves[name]) for name in names if name in run.curves]
    if other:
        lines += [Line(name, other.curves[name], dashed=True) for name in names if name in other.curves]
    return f"<figure><figcaption>{escape(title)}</figcaption>{line_chart(lines)}</figure>"


def _results(run: RecordedRun, other: RecordedRun | None) -> str:
    """Return a table of the first and last values of the evaluations, the reward and the SFT loss."""
    names = [
        name
        for name in run.curves
        if name.startswith("eval/") or name in ("reward/mean", "sft/loss_per_token")
    ]
    if not names:
        return _none()
    head = ["", "first", "last"] + ([f"last of {other.name}"] if other else [])
    rows = []
    for name in names:
        values = [run.curves[name][0][1], run.curves[name][-1][1]]
        cells = [f"{value:.4g}" for value in values]
        if other:
            cells.append(f"{other.curves[name][-1][1]:.4g}" if name in other.curves else "")
        rows.append([name, *cells])
    return _table(head, rows)


def _changes(changes: Changes | str, name: str, other: str) -> str:
    if isinstance(changes, str):
        return f"<p>{escape(changes)}</p>"
    if not changes:
        return "<p>Both have the same configuration.</p>"
    return _table(["key", name, other], [[key, *sides] for key, sides in changes.items()])


def _phases(run: RecordedRun) -> str:
    """Return a bar for each phase of a step, with its mean seconds and its share of the step.

    A sentence about the time of monitoring and a table of idle shares follow.
    """
    found = {
        name.removeprefix("time/"): curve for name, curve in run.curves.items() if name.startswith("time/")
    }
    if not run.curves.get("time/step"):
        return _none()
    steps = run.curves["time/step"]
    whole = sum(value for _, value in steps)
    shares = {
        name: sum(value for _, value in curve)
        for name, curve in found.items()
        if f"time/{name}" not in _NO_PHASES
    }
    longest = max(shares.values())
    rows = [
        (name, max(0.0, total) / longest, f"{total / len(steps):.3f} s a step, {100 * total / whole:.1f}%")
        for name, total in sorted(shares.items(), key=lambda item: -item[1])
    ]
    monitoring = found.get("monitor")
    note = ""
    if monitoring:
        spent = sum(value for _, value in monitoring)
        note = (
            f"<p>Monitoring took {1000 * spent / len(monitoring):.1f} ms a step, "
            f"{100 * spent / whole:.2f}% of it.</p>"
        )
    return share_bars(rows) + note + _busy(run)


def _busy(run: RecordedRun) -> str:
    """Return a table of the share of each driver phase in which ranks, engines and workers were idle.

    It is empty if only the driver recorded phases.
    """
    shares = busy_shares(run.timeline)
    if not shares:
        return ""
    roles = list(next(iter(shares.values())))
    rows = [
        [phase, *(f"{100 * (1 - found[role]):.1f}%" for role in roles)] for phase, found in shares.items()
    ]
    return "<h3>Idle share of each phase</h3>" + _table(["phase", *(f"{role}, mean" for role in roles)], rows)


def _texts(run: RecordedRun, wanted: Callable[[str], bool]) -> str:
    """Return the last few texts of each wanted name as HTML, the newest step first.

    wanted: returns True for the names to show, such as names that begin with `samples/`.
    """
    named = _by_name(run, wanted)
    most = max(_TEXTS // max(1, len(named)), _TEXTS_OF_A_NAME)
    shown = [row for rows in named.values() for row in rows[-most:]]
    return _shown(sorted(shown, key=lambda row: -row["step"]))


def _first_and_last_texts(run: RecordedRun, wanted: Callable[[str], bool]) -> str:
    """Return the first and the last text of each wanted name as HTML, to compare before and after training.

    wanted: returns True for the names to show.
    """
    return _shown([row for rows in _by_name(run, wanted).values() for row in (rows[:1] + rows[1:][-1:])])


def _by_name(run: RecordedRun, wanted: Callable[[str], bool]) -> dict[str, list[dict[str, Any]]]:
    named: dict[str, list[dict[str, Any]]] = {}
    for row in run.texts:
        if wanted(row["name"]):
            named.setdefault(row["name"], []).append(row)
    return named


def _shown(rows: list[dict[str, Any]]) -> str:
    texts = [
        f"<h3>step {row['step']}: {escape(row['name'])}</h3><pre>{escape(row['text'])}</pre>" for row in rows
    ]
    return "".join(texts) or _none()


def _table(head: list[str], rows: list[list[Any]]) -> str:
    lines = ["".join(f"<th>{escape(cell)}</th>" for cell in head)]
    lines += ["".join(f"<td>{escape(cell)}</td>" for cell in row) for row in rows]
    return f"<table>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"


def _none() -> str:
    return '<p class="none">The run has none.</p>'


# Second line of defence: if some text is not escaped, the page still runs no script and loads nothing.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; max-width: 1480px; margin: 1.5em auto; \
padding: 0 1em; color: #222; }
h1 { margin-bottom: 0; } h2 { border-bottom: 1px solid #ccc; margin-top: 1.6em; } \
h3 { margin: 1em 0 .2em; font-size: 1em; }
nav a { margin-right: 1em; }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(420px, 1fr)); gap: 1em; }
figure { margin: 0; padding: .6em; border: 1px solid #e4e4e4; border-radius: 4px; }
figcaption { font-weight: 600; margin-bottom: .3em; }
svg { width: 100%; height: auto; } svg text { font-size: 11px; fill: #555; } \
.y { text-anchor: end; } .x { text-anchor: middle; }
.grid { stroke: #eee; } .axis { stroke: #888; fill: none; }
.line { fill: none; stroke-width: 1.7; stroke-linejoin: round; stroke-linecap: round; }
.legend { font-size: 12px; } .legend span { margin-right: 1em; white-space: nowrap; }
.legend i { display: inline-block; width: 1.2em; height: 3px; margin-right: .4em; vertical-align: middle; }
table { border-collapse: collapse; } \
th, td { text-align: left; padding: .15em 1em .15em 0; vertical-align: top; }
.bars { width: 100%; } .bar { width: 60%; } .bar i { display: block; height: .9em; background: #4477aa; }
pre { background: #f7f7f7; padding: .7em; overflow-x: auto; white-space: pre-wrap; \
overflow-wrap: anywhere; font-size: 12.5px; }
.none { color: #888; }
""".strip()
