"""`grpo-megatron status`: shows the state, step, phase and newest metrics of the run in a folder."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tqdm import tqdm

from grpo_megatron.errors import printable
from grpo_megatron.files import float_or_nan, json_text, reading
from grpo_megatron.monitoring.status import State, read_status
from grpo_megatron.monitoring.terminal import SHOWN
from grpo_megatron.run.checkpoints import CHECKPOINTS, newest_folder

# Metrics of a run's speed, and how they are shown.
_SPEED = {"throughput/tokens_per_second": "{:.0f} tokens/s", "time/step": "{:.2f} s per step"}


def status(folder: str, as_json: bool) -> int:
    """Print the status of the run in a folder, and return the exit status of `grpo-megatron status`.

    The exit status is 0 if the run is still running or has finished, else 1.

    folder: the run's folder.
    as_json: True to print all recorded values as JSON, False to print a text for people.

    Raises UserError if the folder is not the folder of a run, or if its status file is damaged.
    """
    found = read_status(folder)
    with reading(Path(folder, CHECKPOINTS)):
        newest = newest_folder(folder)
    if as_json:
        print(json_text(found | {"checkpoint": newest.name if newest else None}, indent=2))
    else:
        rows = _rows(found, newest, time.time())
        width = max(len(name) for name, _ in rows)
        print(printable("\n".join(f"{name:<{width}}  {text}" for name, text in rows)))
    return 0 if found["state"] in (State.running, State.finished) else 1


def _rows(found: dict[str, Any], newest: Path | None, now: float) -> list[tuple[str, str]]:
    def ago(then: float) -> str:
        return tqdm.format_interval(max(0, now - then))

    state, where = found["state"], f"process {found['pid']} on {found['host']}"
    words = {
        State.gone: (
            f"gone: {where} was killed, or its machine is down; its last status is from "
            f"{ago(found['written'])} ago"
        ),
        State.failed: f"failed {ago(found['written'])} ago: {found.get('error')}",
        State.interrupted: f"interrupted {ago(found['written'])} ago: {found.get('error')}",
        State.finished: f"finished {ago(found['written'])} ago",
        State.running: (
            f"running for {ago(found['started'])}: {where}, status from {ago(found['written'])} ago"
        ),
    }
    rows = [("run", found["run"]), ("state", words[State(state)])]
    eta = found.get("eta")
    left = f", ETA {tqdm.format_interval(eta)}" if state == State.running and eta is not None else ""
    rows.append(("step", f"{found['step']} of {found['total_steps']} done{left}"))
    if state in (State.running, State.gone):
        rows.append(("phase", f"{found['phase']}, for {ago(found['phase_since'])}"))
    metrics = found.get("metrics") or {}
    # A user's own loop logs what it likes, so any metric may be missing.
    measured = {
        "speed": ", ".join(
            form.format(float_or_nan(metrics[name])) for name, form in _SPEED.items() if name in metrics
        ),
        "metrics": _scalars({label: metrics[name] for name, label in SHOWN.items() if name in metrics}),
    }
    rows += [(name, text) for name, text in measured.items() if text]
    if found.get("evaluation"):
        rows.append(("evaluation", f"{_scalars(found['evaluation'])} after {found['evaluation_step']} steps"))
    rows.append(("checkpoint", _checkpoint(newest, ago)))
    rows.append(("restarts", str(found["restarts"])))
    for process in found.get("processes", []) if state in (State.running, State.gone) else []:
        rows.append(
            (
                process["name"],
                f"{process['phase']} for {ago(process['since'])}, last heartbeat {ago(process['heard'])} ago",
            )
        )
    return rows


def _checkpoint(newest: Path | None, ago: Callable[[float], str]) -> str:
    if newest is None:
        return "none yet"
    try:
        return f"{newest.name}, {ago(newest.stat().st_mtime)} ago"
    except OSError as error:
        # A newer checkpoint has replaced this one since it was listed, or on another node while this node
        # still lists it.
        return f"{newest.name}, of unknown age ({error.strerror})"


def _scalars(values: dict[str, float]) -> str:
    return ", ".join(f"{name} {float_or_nan(value):.4g}" for name, value in values.items())
