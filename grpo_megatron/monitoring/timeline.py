"""timeline.json: what every process of a run did when, for chrome://tracing and https://ui.perfetto.dev.

The file is a JSON array of complete events ("ph": "X", times in microseconds) as the Trace Event Format has it, an event a line.
That format lets the closing bracket be absent, so the file of a run that was killed can be opened too.
"""

import json
import threading
from pathlib import Path
from typing import Any

from grpo_megatron.json_files import json_text
from grpo_megatron.monitoring.row_file import RowFile
from grpo_megatron.paths import replace_text

TIMELINE = "timeline.json"
PREVIOUS = "timeline.previous.json"
DRIVER = "driver"
# Lines of a process in the viewers: its phases, and above them the steps that they belong to.
_PHASES, _STEPS = 0, 1


class Timeline:
    """Collects spans from any thread; they are written by `flush`.

    step: the one that spans are of from now on; by it, a resumed run takes back what comes after its checkpoint.
    """

    def __init__(self, directory: str, limit: int, resumed: int = 0):
        """limit: bytes after which the file becomes timeline.previous.json. resumed: the step a resumed run continues after."""
        self._folder, self._limit, self.step = Path(directory), limit, resumed
        # Two locks, of which the second is the outer one: what is added must not wait for a file system that may be slow.
        self._adding, self._writing = threading.Lock(), threading.Lock()
        self._waiting: list[tuple[str, dict[str, Any]]] = []  # a process, and an event without its number
        if resumed:
            for name in (TIMELINE, PREVIOUS):
                _take_back(self._folder / name, resumed)
        else:
            (self._folder / TIMELINE).unlink(missing_ok=True)
        self._open()

    def add(self, process: str, name: str, start: float, seconds: float) -> None:
        """A phase of a process, such as "driver", "trainer rank 3" or "engine 0". start: in seconds since the epoch."""
        self._add(process, name, start, seconds, _PHASES)

    def add_step(self, start: float, seconds: float) -> None:
        """The step as a whole, as the driver saw it; its phases lie within."""
        self._add(DRIVER, f"step {self.step}", start, seconds, _STEPS)

    def _add(self, process: str, name: str, start: float, seconds: float, line: int) -> None:
        times = {"ts": round(start * 1e6, 1), "dur": round(seconds * 1e6, 1)}
        with self._adding:
            self._waiting.append(
                (process, {"name": name, "ph": "X", **times, "tid": line, "args": {"step": self.step}})
            )

    def flush(self) -> None:
        """Write what has been added. Raises OSError where it cannot be; then it is lost."""
        with self._writing:
            with self._adding:
                events, self._waiting = self._waiting, []
            if events:
                self._write(events)
            if self._file.size > self._limit:
                self._rotate()

    def _write(self, events: list[tuple[str, dict[str, Any]]]) -> None:
        """The viewers know processes by number; each is named once in a file."""
        numbers, rows = dict(self._numbers), []
        for process, event in events:
            if process not in numbers:
                numbers[process] = len(numbers)
                rows.append(_named(process, numbers[process]))
            rows.append(json_text({**event, "pid": numbers[process]}))
        self._file.append("".join(f",\n{row}" for row in rows))
        self._numbers = numbers

    def _rotate(self) -> None:
        """Begin a new file. Where that fails, the old one goes on."""
        path, previous, old = self._folder / TIMELINE, self._folder / PREVIOUS, self._file
        path.replace(previous)
        try:
            self._open()
        except BaseException:
            previous.replace(path)
            raise
        old.close()

    def _open(self) -> None:
        path, numbers = self._folder / TIMELINE, {DRIVER: 0}
        file = RowFile(path)
        try:
            if not file.size:
                # A comma stands before each row but the first, so that none is at the end of an unfinished file.
                file.append("[\n" + _named(DRIVER, 0))
            named = [event for event in read_timeline(path) if event["name"] == "process_name"]
        except BaseException:
            file.close()
            raise
        self._file, self._numbers = file, numbers | {event["args"]["name"]: event["pid"] for event in named}

    def close(self) -> None:
        try:
            self.flush()
            self._file.append("\n]\n")
        finally:
            self._file.close()


def _named(process: str, number: int) -> str:
    return json_text({"name": "process_name", "ph": "M", "pid": number, "args": {"name": process}})


def read_timeline(path: Path) -> list[dict[str, Any]]:
    """The events of a file that may have been cut off anywhere; what is no event is left out."""
    events = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            event = json.loads(line.strip().rstrip(","))
        except ValueError:
            continue  # a bracket, or half a row
        if isinstance(event, dict) and {"name", "ph", "args"} <= event.keys():
            events.append(event)
    return events


def _take_back(path: Path, resumed: int) -> None:
    if not path.exists():
        return
    kept = [event for event in read_timeline(path) if event["args"].get("step", 0) <= resumed]
    if kept:
        replace_text(path, "[\n" + ",\n".join(json_text(event) for event in kept))
    else:
        # Empty, or full of zero bytes, as the loss of a node leaves what it had just begun. A bracket alone would pass for a file in which
        # the driver has its name.
        path.unlink()
