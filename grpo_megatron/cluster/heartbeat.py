"""Heartbeats: each process tells the driver what it is doing, from a thread that runs even in a collective.

Every two seconds the thread writes one small value into the key-value store of Ray's GCS, where
`cluster.hang_detector` reads it. Alternatives that were rejected:

- A method in a Ray concurrency group of its own. An actor with such groups runs all of its methods outside of
  the main thread, so torch would move to another thread. The driver would also call each of 1,024 ranks every
  few seconds.
- A socket. It is one more port to guard, and one more address to pass around.
- A file in the run's folder. A thousand ranks would rewrite their files on the cluster's file system.

The store needs no port, and serves threads of plain and of async actors alike. A heartbeat costs its process
less than 1 ms of CPU time, which is 0.05%. The driver reads 1,000 heartbeats of 3 kB with one call in 65 ms.

A process has made progress if its threads are at other places in their Python code than at the last
heartbeat, or if a counter has changed: its own, or that of `grpo_megatron.progress`. Places alone are not
enough. A loop that waits in one place nearly all the time, such as passes over micro-batches or reads of a
file, could be found there at every heartbeat.
"""

import json
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, Protocol

from grpo_megatron.files import json_text
from grpo_megatron.progress import moves

BEAT_SECONDS = 2.0
NAMESPACE = b"grpo_megatron"
# Stacks are sent only after this time. They are long, and many ranks wait for some seconds now and then.
# Every cluster.hang_timeout is longer.
_STACKS_SECONDS = 10.0
# Several heartbeats repeat a phase that has ended, because the driver may miss one.
_TOLD_SECONDS = 5 * BEAT_SECONDS
_MOST_SPANS = 256


class Span(NamedTuple):
    """A phase (call) that a process has completed, for the timeline of the run.

    sequence_number: index of the span among the spans of its process, from 1
    phase: name of the phase, such as `train_step`
    start: time at which the phase began, in seconds since the epoch
    seconds: duration of the phase
    """

    sequence_number: int
    phase: str
    start: float
    seconds: float


@dataclass(frozen=True)
class Beat:
    """One heartbeat: what a process is doing."""

    sequence_number: int = 0
    """Index of the heartbeat among the heartbeats of its process, from 1."""
    role: str = ""
    """Name of the process for messages, such as `rank 1 (tp1 pp0 cp0 dp0 ep0)`."""
    phase: str | None = None
    """Name of the call that the process executes, such as `train_step`; None if the process is idle."""
    alone: bool = False
    """True if the process waits for no other process in this phase, so that only its own progress counts."""
    seconds: float = 0.0
    """Seconds since the phase began; 0 if the process is idle."""
    still: float = 0.0
    """Seconds since the process last made progress."""
    place: str = ""
    """File, line and function that the process is in. Empty if it is idle or has made progress since the last
    heartbeat."""
    stacks: str = ""
    """Stacks of all threads as text. Empty if `still` is below _STACKS_SECONDS or the process is idle."""
    spans: list[Span] = field(default_factory=list)
    """The phases that ended in the last seconds. Several heartbeats repeat a phase, in case one is missed."""

    def encode(self) -> bytes:
        return json_text(vars(self)).encode()

    @classmethod
    def decode(cls, value: bytes) -> "Beat":
        values = json.loads(value)
        return cls(**values | {"spans": [Span(*span) for span in values["spans"]]})


class ProgressSource(Protocol):
    """Interface of an object that tells what its own process is doing.

    The thread that sends the heartbeats of the process calls its methods.
    """

    def progress(self) -> Any:
        """Return a value that changes whenever the process makes progress. Its type does not matter."""

    def place(self) -> str:
        """Return the file, line and function that the process is in, as text for a message."""

    def stacks(self) -> str:
        """Return the stacks of all threads as text, for the report about a hang."""


class PythonThreads:
    """A ProgressSource that observes the Python threads of the process, except the thread that calls it.

    `progress` returns the positions of the threads in the code. `place` describes the main thread, in which
    Ray runs the methods of actors.
    """

    def progress(self) -> dict[int, list]:
        return {
            thread: [(frame.f_code, frame.f_lasti) for frame, _ in traceback.walk_stack(top)]
            for thread, top in self._others()
        }

    def place(self) -> str:
        top = dict(self._others())[threading.main_thread().ident]
        return f"{'/'.join(Path(top.f_code.co_filename).parts[-2:])}:{top.f_lineno} {top.f_code.co_name}"

    def stacks(self) -> str:
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        return "\n".join(
            f"thread {names.get(thread, thread)}\n{''.join(traceback.format_stack(top))}"
            for thread, top in self._others()
        )

    def _others(self) -> list[tuple[int, FrameType]]:
        return [
            (thread, top) for thread, top in sys._current_frames().items() if thread != threading.get_ident()
        ]


class Heartbeat:
    """Sends a process's heartbeats to the driver, and records which phase (call) the process is in.

    After `start`, a thread sends a heartbeat every two seconds.

    role: name of the process for messages, such as `rank 1 (tp1 pp0 cp0 dp0 ep0)`
    """

    def __init__(self, source: ProgressSource | None = None):
        """Prepare the heartbeats. `start` begins to send them.

        source: observes what the process does. If None, the Python threads of the process are observed.
        """
        self._source = source or PythonThreads()
        self.role = ""
        self._lock = threading.Lock()
        self._open: dict[str, _Phase] = {}
        self._spans: deque[Span] = deque(maxlen=_MOST_SPANS)
        self._beats, self._ended, self._moves = 0, 0, 0
        self._beat, self._seen, self._looked = Beat(), None, time.monotonic()

    def tick(self) -> None:
        """Count one unit of progress, so that the process is not taken for one that hangs.

        Code that may take long calls this regularly, for example after each micro-batch.
        """
        self._moves += 1

    @contextmanager
    def phase(self, name: str, alone: bool = False) -> Iterator[None]:
        """Record that the process is in the phase `name` while the context is open.

        Contexts with the same name may overlap. The phase then lasts from the start of the first context to
        the end of the last context. If several phases are open, heartbeats name the one that began last.

        alone: True if the process does not wait for other processes in this phase.
        """
        with self._lock:
            self._open.setdefault(name, _Phase(alone)).count += 1
            self._moves += 1
        try:
            yield
        finally:
            with self._lock:
                phase = self._open[name]
                phase.count -= 1
                self._moves += 1
                if not phase.count:
                    del self._open[name]
                    self._ended += 1
                    self._spans.append(Span(self._ended, name, phase.start, time.monotonic() - phase.began))

    def start(self) -> None:
        """Start the thread that sends heartbeats.

        The process must be a Ray actor. The heartbeats are stored in Ray's key-value store under the actor's
        id.
        """
        # Imported here and in `beat`, because the training engine also has a Heartbeat where Ray is not
        # installed. It is never started there.
        import ray

        self._key = ray.get_runtime_context().get_actor_id().encode()
        threading.Thread(target=self._run, name="heartbeat", daemon=True).start()

    def _run(self) -> None:
        while True:
            # If one heartbeat fails, the next may succeed. The hang detector finds a process that stays
            # silent.
            with suppress(Exception):
                self._look()
                self.beat()
            time.sleep(BEAT_SECONDS)

    def _look(self) -> None:
        now, seen = time.monotonic(), (self._moves, moves(), self._source.progress())
        same, passed = seen == self._seen, now - self._looked
        self._seen, self._looked = seen, now
        with self._lock:
            name, phase = next(reversed(self._open.items()), (None, None))
        asked = phase is not None
        # If much more time has passed than between two heartbeats, this thread was suspended too, as in a
        # suspended job. That time does not count.
        still = self._beat.still + min(passed, 2 * BEAT_SECONDS) if same else 0.0
        self._beat = Beat(
            role=self.role,
            phase=name,
            alone=asked and phase.alone,
            seconds=now - phase.began if asked else 0.0,
            still=still,
            place=self._source.place() if asked and same else "",
            stacks=self._source.stacks() if asked and still >= _STACKS_SECONDS else "",
        )

    def beat(self) -> None:
        """Send a heartbeat now. This method does not observe the process anew.

        The heartbeat has the newest observation of the process, and the phases that have ended lately.
        """
        from ray.experimental import internal_kv

        with self._lock:
            self._beats += 1
            beat = replace(self._beat, sequence_number=self._beats, spans=list(self._spans))
        internal_kv._internal_kv_put(self._key, beat.encode(), overwrite=True, namespace=NAMESPACE)
        with self._lock:
            while self._spans and self._spans[0].start + self._spans[0].seconds < time.time() - _TOLD_SECONDS:
                self._spans.popleft()


class _Phase:
    """A phase (call of a process) in progress.

    alone: True if the process waits for no other process in this phase
    count: number of open contexts with the phase's name
    start: time at which the phase began, in seconds since the epoch
    began: the same time as a value of time.monotonic
    """

    def __init__(self, alone: bool):
        self.alone, self.count = alone, 0
        self.start, self.began = time.time(), time.monotonic()
