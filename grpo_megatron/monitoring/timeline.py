"""The file timeline.json: phases of every process of a run, with start and duration.

chrome://tracing and https://ui.perfetto.dev show it. The file is a JSON array of complete events ("ph": "X",
times in microseconds) of the Trace Event Format, with one event per line. The format allows the closing
bracket to be absent, so the file of a killed run can be opened too.
"""

import json
import threading
from pathlib import Path
from typing import Any

from grpo_megatron.files import RowFile, json_text, replace_text

TIMELINE = "timeline.json"
PREVIOUS = "timeline.previous.json"
DRIVER = "driver"
# Lines of a process in the viewers: its phases, and above them the steps that they belong to.
_PHASES, _STEPS = 0, 1


class Timeline:
    """Writer of timeline.json, which records the phases of all processes of a run as spans of time.

    Any thread may add spans, even before `open`. `flush` writes the added spans to the file.

    step: the current step. It is written with each span, so that a resumed run can remove the spans of steps
        after its checkpoint
    """

    def __init__(self, directory: str, limit: int, resumed: int = 0):
        """Prepare to record spans, without a change to any file.

        directory: the run's folder
        limit: size in bytes above which the file is renamed to timeline.previous.json, and a new file begins
        resumed: step of the checkpoint that the run continues from; 0 for a new run
        """
        self._folder, self._limit, self.step = Path(directory), limit, resumed
        # Two locks, because `add` must not wait for a slow file system. `flush` takes `_writing` first.
        self._adding, self._writing = threading.Lock(), threading.Lock()
        self._waiting: list[tuple[str, dict[str, Any]]] = []  # (process, event without its pid)
        self._file: RowFile | None = None
        self._resumed = resumed

    def open(self) -> None:
        """Open the file, and remove the spans of steps that are made again."""
        for name in (TIMELINE, PREVIOUS):
            _remove_later(self._folder / name, self._resumed)
        self._open()

    def add(self, process: str, name: str, start: float, seconds: float) -> None:
        """Add a span: one phase of a process.

        process: name of the process, such as "driver", "trainer rank 3" or "engine 0".
        name: name of the phase.
        start: seconds since the epoch.
        seconds: duration of the phase.
        """
        self._add(process, name, start, seconds, _PHASES)

    def add_step(self, start: float, seconds: float) -> None:
        """Add a span of the driver for the whole current step. Viewers show it above the phases of the step.

        start: seconds since the epoch.
        seconds: duration of the step.
        """
        self._add(DRIVER, f"step {self.step}", start, seconds, _STEPS)

    def _add(self, process: str, name: str, start: float, seconds: float, line: int) -> None:
        times = {"ts": round(start * 1e6, 1), "dur": round(seconds * 1e6, 1)}
        with self._adding:
            self._waiting.append(
                (process, {"name": name, "ph": "X", **times, "tid": line, "args": {"step": self.step}})
            )

    def flush(self) -> None:
        """Write the spans added since the last call. If the file has become too large, begin a new file.

        Raises OSError if the spans cannot be written, or if no new file can be opened. Spans that cannot be
        written are lost.
        """
        with self._writing:
            with self._adding:
                events, self._waiting = self._waiting, []
            if events:
                self._write(events)
            if self._file.size > self._limit:
                self._rotate()

    def _write(self, events: list[tuple[str, dict[str, Any]]]) -> None:
        """Append events to the file. The format identifies processes by integers, which are added here.

        Before the first event of a process, a row with the process's name and integer is written.

        events: list of (name of the process, event).
        """
        pids, rows = dict(self._pids), []
        for process, event in events:
            if process not in pids:
                pids[process] = len(pids)
                rows.append(_named(process, pids[process]))
            rows.append(json_text({**event, "pid": pids[process]}))
        self._file.append("".join(f",\n{row}" for row in rows))
        self._pids = pids

    def _rotate(self) -> None:
        """Rename the file to timeline.previous.json, and begin a new file.

        Raises OSError if a new file cannot be opened. The old file then keeps its name and stays in use.
        """
        path, previous, old = self._folder / TIMELINE, self._folder / PREVIOUS, self._file
        path.replace(previous)
        try:
            self._open()
        except BaseException:
            previous.replace(path)
            raise
        old.close()

    def _open(self) -> None:
        path, pids = self._folder / TIMELINE, {DRIVER: 0}
        file = RowFile(path)
        try:
            if not file.size:
                # Each row except the first begins with a comma, so that an unfinished file does not end with
                # a comma.
                file.append("[\n" + _named(DRIVER, 0))
            named = [event for event in read_timeline(path) if event["name"] == "process_name"]
        except BaseException:
            file.close()
            raise
        self._file, self._pids = file, pids | {event["args"]["name"]: event["pid"] for event in named}

    def close(self) -> None:
        """Write the remaining spans, and close the file. Without `open`, nothing is written."""
        if self._file is None:
            return
        try:
            self.flush()
            self._file.append("\n]\n")
        finally:
            self._file.close()


def _named(process: str, pid: int) -> str:
    return json_text({"name": "process_name", "ph": "M", "pid": pid, "args": {"name": process}})


def read_timeline(path: Path) -> list[dict[str, Any]]:
    """Return the events in a timeline file. Damaged lines, such as a line that was cut off, are left out."""
    events = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            event = json.loads(line.strip().rstrip(","))
        except ValueError:
            continue  # a bracket, or half a row
        if isinstance(event, dict) and {"name", "ph", "args"} <= event.keys():
            events.append(event)
    return events


def _remove_later(path: Path, resumed: int) -> None:
    """Remove the events of steps after `resumed` from a timeline file. Delete the file if none are left."""
    if not path.exists():
        return
    kept = [event for event in read_timeline(path) if event["args"].get("step", 0) <= resumed]
    if kept:
        replace_text(path, "[\n" + ",\n".join(json_text(event) for event in kept))
    else:
        # No event is left, for example because the node was lost soon after the file was begun, which leaves
        # zero bytes. A file with only a bracket would be taken for a file that already names the driver.
        path.unlink()
