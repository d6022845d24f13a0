"""`grpo-megatron ledger`: shows what became of a run's samples, and whether the books balance.

The books balance if every sample of a step ended exactly once: trained, filtered, failed or lost.
"""

from pathlib import Path
from typing import Any

import numpy as np

from grpo_megatron.errors import UserError
from grpo_megatron.files import json_text
from grpo_megatron.logs import table_text
from grpo_megatron.monitoring.report.read import REPORT
from grpo_megatron.monitoring.trajectories import anchor_of
from grpo_megatron.paths import is_absent
from grpo_megatron.samples.blocks import LEDGER, read_blocks
from grpo_megatron.samples.entries import SampleState
from grpo_megatron.samples.ledger import read_books

_SHOWN = ("admitted", "trained", "filtered", "failed", "lost", "waiting", "prompts", "tokens")


def ledger(
    folder: str, as_json: bool, steps: int, sample: int | None = None, prompt: int | None = None
) -> int:
    """Print what became of a run's samples: the counts of each step, or all entries of one sample or prompt.

    folder: the run's folder.
    as_json: print JSON, rather than a text for people.
    steps: number of steps to show: the last ones of the run.
    sample: id of the sample to show. If `sample` and `prompt` are None, the steps are shown.
    prompt: uid of the prompt whose samples are shown. It takes precedence over `sample`.

    Returns the exit status: 1 if the steps are shown and a sample has not ended exactly once, else 0. Raises
    UserError if the folder has no ledger, if the ledger is damaged, or if it lacks the sample or the prompt.
    """
    path = Path(folder, LEDGER)
    if is_absent(path):
        raise UserError(f"{path} does not exist; only `train` writes a ledger, from its first step on")
    if sample is None and prompt is None:
        return _show_balance(path, as_json, steps)
    key, wanted = ("sample", sample) if prompt is None else ("prompt", prompt)
    found = sorted(_story(path, key, wanted), key=lambda row: (row["attempt"], row["sample"]))
    if not found:
        raise UserError(f"{path} has no {key} {wanted}")
    links = _links(Path(folder, REPORT), found)
    if as_json:
        rows = [
            row | {"report": links.get((row["step"], row["sample"])) if _counts(row) else None}
            for row in found
        ]
        print(json_text(rows, indent=2))
    else:
        shown = [f"step {step}  sample {own}  in the report: {link}" for (step, own), link in links.items()]
        print("\n".join([*map(_line, found), *shown]))
    return 0


def _links(report: Path, rows: list[dict[str, Any]]) -> dict[tuple[int, int], str]:
    """Return {(step, sample): link to the sample in the run's report} of the samples that the report shows.

    rows: rows of `_story`. The report shows no undone steps.
    """
    if is_absent(report):
        return {}
    page = report.read_text(encoding="utf-8", errors="replace")
    found = dict.fromkeys((row["step"], row["sample"]) for row in rows if _counts(row))
    anchors = {place: anchor_of(*place) for place in found}
    return {
        place: f"{report.resolve().as_uri()}#{anchor}"
        for place, anchor in anchors.items()
        if f'id="{anchor}"' in page
    }


def _counts(row: dict[str, Any]) -> bool:
    """Return True if no later start of the run has undone the step of a row."""
    return row["undone_by"] is None


def _show_balance(path: Path, as_json: bool, steps: int) -> int:
    books, _, _ = read_books(path)
    last = books.last_step()
    shown = [{"step": step, **books.of_step(step)} for step in range(max(last - steps, 0) + 1, last + 1)]
    shown = [row for row in shown if row["admitted"]]  # the first steps may be of another run
    total = books.totals()
    if as_json:
        found = {"steps": shown, "total": total, "faults": [str(fault) for fault in books.faults]}
        print(json_text(found, indent=2))
    else:
        rows = [(" step", *_SHOWN)]
        rows += [(f"{row['step']:>5}", *(str(row[name]) for name in _SHOWN)) for row in shown]
        rows.append(("total", *(str(total[name]) for name in _SHOWN)))
        print(table_text(rows))
        for fault in books.faults:
            print(f"not balanced: {fault}")
    return 1 if books.faults else 0


def _story(path: Path, key: str, wanted: int) -> list[dict[str, Any]]:
    """Return a row for each ledger entry of a sample, or of a prompt's samples, in the order of the file.

    A row has the integers "attempt", "step", "prompt" and "sample", and "text", which says what happened.
    After an entry, the run may have gone back to a step before the entry's step. "undone_by" is then the step
    that the run went back to, else None.

    key: "sample" or "prompt".
    wanted: the sample's id, or the prompt's uid.
    """
    found: list[dict[str, Any]] = []
    names: list[str] = []
    for block in read_blocks(path):
        names += block.names
        entries = block.entries
        for entry in entries[(entries[key] == wanted) & (entries["state"] != SampleState.rewind)]:
            text = _text(entry, names)
            ids = {name: int(entry[name]) for name in ("step", "prompt", "sample")}
            found.append({"attempt": block.attempt, **ids, "text": text, "undone_by": None})
        for rewind in entries[entries["state"] == SampleState.rewind]:
            for row in found:
                if row["undone_by"] is None and row["step"] > rewind["step"]:
                    row["undone_by"] = int(rewind["step"])
    return found


def _line(row: dict[str, Any]) -> str:
    """Return a line of text that shows what became of a sample at one time.

    row: dict with "attempt", "step", "prompt", "sample", "text" and "undone_by", as `_story` returns it.
    """
    place = "  ".join(f"{name} {row[name]}" for name in ("attempt", "step", "prompt", "sample"))
    undone = row["undone_by"]
    return f"{place}  {row['text']}" + ("" if undone is None else f" (undone by the return to step {undone})")


def _text(entry: np.void, names: list[str]) -> str:
    """Return a text that says what a ledger entry records, such as `scored: reward 1`.

    entry: a row of the type samples.entries.ENTRY.
    names: names of filters and reasons in the file. The entry refers to a name by its position, from 1.
    """
    state = SampleState(entry["state"])
    name = names[entry["name"] - 1] if entry["name"] else ""
    if state == SampleState.generated:
        oldest, newest = entry["oldest"], entry["newest"]
        version = "unknown" if oldest < 0 else f"{oldest}" if oldest == newest else f"{oldest} to {newest}"
        return f"generated: {entry['tokens']} tokens with its prompt, weight version {version}"
    if state == SampleState.scored:
        return f"scored: reward {entry['value']:.4g}"
    if state == SampleState.trained:
        return (
            f"trained: optimizer step {entry['optimizer_step']}, weight {entry['value']:.4g} per token, "
            f"{entry['updates']} updates of the model"
        )
    if state == SampleState.filtered:
        return f"filtered by {name}"
    return f"{state.name}: {name}" if name else state.name
