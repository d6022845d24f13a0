"""The hang detector: the driver watches whether processes make progress, and kills those that hang."""

import logging
import re
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import ray
from ray.exceptions import RayError
from ray.experimental import internal_kv

from grpo_megatron.cluster.heartbeat import BEAT_SECONDS, NAMESPACE, Beat
from grpo_megatron.cluster.processes import Process
from grpo_megatron.cluster.ray_errors import ENDED
from grpo_megatron.errors import ProcessLost, UserError
from grpo_megatron.paths import within

logger = logging.getLogger(__name__)
# Callback for a phase that has ended: process, phase, start in seconds since the epoch, duration in seconds.
TakeSpan = Callable[[str, str, float, float], None]
# Callback for the calls that are in progress, see `at_work`.
TakeWork = Callable[[list[dict[str, Any]]], None]
_SHOWN = 3
# The file with torch's collectives, as it appears in Beat.place.
_COLLECTIVE = "distributed_c10d.py"
_FLUSH_SECONDS = 5.0
_STACKS_SECONDS = 20.0
# How long a living process may take to answer when it is asked after a long silence. A call to a dead process
# fails at once.
_ANSWER_SECONDS = 5.0


class ProcessHangs(ProcessLost):
    """Processes made no progress in a call for longer than cluster.hang_timeout, so they were killed."""


@dataclass(eq=False)
class Watched:
    """A process that the hang detector watches, and its newest heartbeat."""

    process: Process
    """Name and log of the process."""
    actor: ray.actor.ActorHandle
    """Ray's handle for the process, which is an actor."""
    beat: Beat | None = None
    """The newest heartbeat; None before the first."""
    silent: float = 0.0
    """Seconds since the newest heartbeat."""
    spans: int = 0
    """Number of the last phase passed on to the timeline (Span.sequence_number); 0 if there is none."""

    @property
    def name(self) -> str:
        return (self.beat and self.beat.role) or self.process.name


@dataclass(frozen=True)
class Hang:
    """The processes of a run at the moment when some of them are found to hang.

    silent: processes that have sent no heartbeat for longer than the time limit
    still: processes that send heartbeats, but whose call has made no progress for longer than the time limit
    others: all other processes that are in a call. In each of their calls, some process still makes progress.
    """

    silent: list[Watched]
    still: list[Watched]
    others: list[Watched]

    @property
    def at_fault(self) -> list[Watched]:
        """The processes that are assumed to have caused the hang. They are killed.

        If some processes have sent no heartbeat for too long (`silent`), they are the cause. Otherwise the
        processes that make no progress (`still`) are grouped by their position in the code. The smallest
        group is the cause (or all groups of this size), because in most hangs many ranks wait for a few.
        Processes that wait in a collective are left out, unless all processes in `still` do so.
        """
        if self.silent:
            return self.silent
        by_place = defaultdict(list)
        for watched in [
            watched for watched in self.still if _COLLECTIVE not in watched.beat.place
        ] or self.still:
            # The place of an engine contains its process ids. Without their removal, every engine would be
            # the only one at its place, and so belong to the smallest groups.
            by_place[re.sub(r" \(pid \d+\)", "", watched.beat.place)].append(watched)
        fewest = min(len(group) for group in by_place.values())
        return [watched for group in by_place.values() if len(group) == fewest for watched in group]

    def message(self) -> str:
        """Return the error message for ProcessHangs: which processes hang, and where. At most five lines."""
        at_fault = self.at_fault
        lines = [self.line(watched) for watched in at_fault[:_SHOWN]]
        if len(at_fault) > _SHOWN:
            lines.append(f"and {len(at_fault) - _SHOWN} more")
        places = Counter(
            f"`{watched.beat.phase}`" + (f", at {watched.beat.place}" if watched.beat.place else "")
            for watched in (*self.still, *self.others)
            if watched not in at_fault
        )
        if places:
            most = [f"{count} in {place}" for place, count in places.most_common(2)]
            lines.append(f"other processes: {'; '.join(most)}")
        return "\n".join(lines)

    def line(self, watched: Watched) -> str:
        """Describe one process in one line: its call, the seconds in the call, and its place in the code.

        If the process has stopped sending heartbeats, the line says instead for how long, and its last call.
        """
        beat = watched.beat
        if watched in self.silent:
            last = f", last in `{beat.phase}`" if beat.phase else ""
            return f"{watched.name} has sent no heartbeat for {watched.silent:.0f} s{last}"
        where = f", at {beat.place}" if beat.place else ""
        return f"{watched.name} in `{beat.phase}` for {beat.seconds:.0f} s{where}"


def find_hang(all_watched: list[Watched], timeout: float) -> Hang | None:
    """Return a Hang that lists the processes that hang, or None if no process of the run hangs.

    A process hangs if it has sent no heartbeat for `timeout` seconds. Processes in the same call may wait for
    each other, so they hang only if none of them has made progress for `timeout` seconds. A process whose
    heartbeat has the flag `alone` waits for no other, so only its own progress counts.

    all_watched: all processes of the run. Those that have not sent a heartbeat yet are ignored.
    timeout: seconds.
    """
    heard = [watched for watched in all_watched if watched.beat]
    silent = [watched for watched in heard if watched.silent > timeout]
    asked = [watched for watched in heard if watched.beat.phase and watched not in silent]
    calls = defaultdict(list)
    for watched in asked:
        calls[watched.process.name if watched.beat.alone else watched.beat.phase].append(watched)
    still = [
        watched
        for members in calls.values()
        if all(member.beat.still > timeout for member in members)
        for watched in members
    ]
    if not silent and not still:
        return None
    return Hang(silent, still, [watched for watched in asked if watched not in still])


def at_work(all_watched: list[Watched], now: float) -> list[dict[str, Any]]:
    """Return the calls that processes are executing now, for status.json: one dict for each call.

    - "name": the process that has been in the call longest, and how many others are in the call, as text
    - "phase": name of the call
    - "since": time at which this process entered the call
    - "heard": time of the last heartbeat of the process that has been silent longest

    All times are in seconds since the epoch.

    all_watched: all processes of the run.
    now: the present time.
    """
    calls = defaultdict(list)
    for watched in all_watched:
        if watched.beat and watched.beat.phase:
            calls[watched.beat.phase].append(watched)
    rows = []
    for phase, members in calls.items():
        longest = max(members, key=lambda member: member.beat.seconds + member.silent)
        others = f" and {len(members) - 1} more" if len(members) > 1 else ""
        since = now - longest.beat.seconds - longest.silent
        heard = now - max(member.silent for member in members)
        rows.append({"name": longest.name + others, "phase": phase, "since": since, "heard": heard})
    return rows


class HangDetector:
    """Watches the heartbeats of a run's processes in a thread, and kills the processes that hang.

    The thread runs while this object is open as a context. When a process is killed, the driver's pending
    call to this process fails. The context then raises ProcessHangs in place of the error of that call,
    unless the run goes on without the process (`outlived`).
    """

    def __init__(self, folder: str, timeout: float, take_work: TakeWork | None = None):
        """Prepare to watch processes. Each process must be added by `add`.

        folder: folder for a file with the Python stacks of all processes when some of them hang
        timeout: seconds without progress or without a heartbeat, after which a process counts as hanging
        take_work: called every two seconds, in another thread, with the calls in progress (see `at_work`)
        """
        self._folder, self._timeout, self._take_work = Path(folder), timeout, take_work
        self._lock = threading.Lock()
        self._watched: dict[str, Watched] = {}
        self._take_span: TakeSpan | None = None
        self._verdict: str | None = None
        self._patient_until = 0.0  # time.monotonic() until which waiting processes do not count as hanging
        self._killed: list[ray.actor.ActorHandle] = []  # the processes that the verdict is about
        self._stop: threading.Event | None = None
        self._thread: threading.Thread | None = None

    def add(self, process: Process, actor: ray.actor.ActorHandle) -> None:
        """Watch a process from its first heartbeat on.

        process: name and log of the process.
        actor: Ray's handle for the process. The process must have started a Heartbeat.
        """
        with self._lock:
            self._watched[_key(actor)] = Watched(process, actor)

    def remove(self, actor: ray.actor.ActorHandle) -> None:
        """Stop watching an actor, because it is about to be killed.

        The actor's last heartbeat stays in Ray's key-value store, because deleting it would block for a
        minute if Ray's head has died.
        """
        with self._lock:
            self._watched.pop(_key(actor), None)

    def outlived(self, actor: ray.actor.ActorHandle) -> None:
        """Tell the detector that the run goes on without a process, even if the detector has killed it.

        After a hang, call this for every killed process. The hang is then only logged as a warning, no
        ProcessHangs is raised when the detector's context ends, and the detector looks for hangs again.
        """
        with self._lock:
            # A process that was lost while its stacks are written must not be killed and blamed after that.
            self._watched = {key: one for key, one in self._watched.items() if one.actor != actor}
            if actor not in self._killed:
                return
            self._killed.remove(actor)
            if not self._killed:
                logger.warning(self._verdict)
                # Processes that waited for a killed one take some seconds to notice that they can go on.
                self._patient_until = time.monotonic() + self._timeout
                self._verdict = None  # the thread goes on

    def tell_spans(self, take: TakeSpan) -> None:
        """Set the function that receives the phases (calls) of all processes, for example to draw a timeline.

        take: called with (name of the process, name of the phase, start in seconds since the epoch, duration
            in seconds) for each phase that ends from now on, some seconds after its end, in another thread.
        """
        self._take_span = take

    def flush(self) -> None:
        """Report all phases that have ended so far to the function given to `tell_spans`.

        This completes the timeline at the end of a run. The method asks every process for a heartbeat, so all
        processes should be alive and idle. It waits at most five seconds for their answers.
        """
        with self._lock:
            beats = [watched.actor.beat.remote() for watched in self._watched.values()]
        if beats:  # without actors Ray may not run, and ray.wait would start it or look for it
            ray.wait(beats, num_returns=len(beats), timeout=_FLUSH_SECONDS)
            self._read(passed=0.0)

    def __enter__(self) -> Self:
        self._verdict, self._killed = None, []
        # An earlier thread may still wait for Ray's head. Its own event tells it to end then.
        self._stop = threading.Event()
        self._thread = threading.Thread(
            target=self._run, args=(self._stop,), name="hang detector", daemon=True
        )
        self._thread.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: object) -> None:
        self._stop.set()
        self._thread.join(_FLUSH_SECONDS)  # it may wait for Ray's head, which may be dead
        # A UserError other than ProcessLost does not come from a killed process. It would occur again after a
        # restart, so it is not replaced.
        refused = isinstance(error, UserError) and not isinstance(error, ProcessLost)
        if self._verdict and isinstance(error, Exception) and not refused:
            raise ProcessHangs(self._verdict) from error

    def _run(self, stop: threading.Event) -> None:
        looked = time.monotonic()
        while not stop.wait(BEAT_SECONDS):
            if self._verdict:
                continue  # the `with` block ends soon, or `outlived` clears the verdict
            now = time.monotonic()
            # More time has passed if this process itself was suspended, such as in a suspended job.
            passed, looked = min(now - looked, 2 * BEAT_SECONDS), now
            try:
                self._read(passed)
                hang = self._judge()
            except Exception:
                # No process can be judged while Ray does not answer.
                logger.warning(
                    "the hang detector could not read the heartbeats of the run's processes", exc_info=True
                )
                continue
            if stop.is_set():
                return
            with self._lock:
                work = at_work(list(self._watched.values()), time.time())
            if self._take_work:
                self._take_work(work)
            if hang:
                self._end(hang)

    def _judge(self) -> Hang | None:
        """Return the hang, or None if no process hangs. Stop watching processes that are dead.

        A dead process sends no heartbeats either, but must not count as hanging. The next call to the process
        reports its death, with cause and log.
        """
        with self._lock:
            watched = dict(self._watched)
        hang = find_hang(list(watched.values()), self._timeout)
        if hang and not hang.silent and time.monotonic() < self._patient_until:
            return None
        dead = _dead(hang.silent) if hang else []
        if not dead:
            return hang
        names = ", ".join(one.name for one in dead)
        logger.warning("the hang detector stops watching these dead processes: %s", names)
        with self._lock:
            # In the meantime a replacement may have been added, or the driver may have removed the process.
            self._watched = {key: one for key, one in self._watched.items() if one not in dead}
        return find_hang([one for one in watched.values() if one not in dead], self._timeout)

    def _end(self, hang: Hang) -> None:
        message = hang.message()
        # The file system that the stacks go to may be what hangs.
        try:
            message += "\n" + within(_STACKS_SECONDS, lambda: self._write_stacks(hang))
        except TimeoutError:
            message += f"\nthe Python stacks could not be written within {_STACKS_SECONDS:.0f} s"
        finally:
            self._kill(hang, message)

    def _kill(self, hang: Hang, message: str) -> None:
        """Kill the processes at fault that are still watched. `message` becomes the verdict."""
        with self._lock:
            killed = [one.actor for one in hang.at_fault if one in self._watched.values()]
            if killed:
                self._verdict, self._killed = message, list(killed)
        if not killed:
            logger.warning("%s\nthe run has already gone on without these processes", message)
        for actor in killed:
            ray.kill(actor)

    def _read(self, passed: float) -> None:
        """Read the newest heartbeats of all watched processes from Ray's key-value store.

        passed: seconds since the last read, which are added to the silence of each process without a new
            heartbeat.
        """
        with self._lock:
            watched = {key.encode(): watched for key, watched in self._watched.items()}
        values = (
            internal_kv.internal_kv_get_gcs_client().internal_kv_multi_get(list(watched), NAMESPACE)
            if watched
            else {}
        )
        with self._lock:
            for key, value in values.items():
                self._hear(watched[key], Beat.decode(value), passed)

    def _hear(self, watched: Watched, beat: Beat, passed: float) -> None:
        if watched.beat and beat.sequence_number <= watched.beat.sequence_number:
            watched.silent += passed
            return
        for span in beat.spans:
            if span.sequence_number > watched.spans and self._take_span:
                self._take_span(watched.process.name, span.phase, span.start, span.seconds)
        watched.spans = max([watched.spans, *(span.sequence_number for span in beat.spans)])
        watched.beat, watched.silent = beat, 0.0

    def _write_stacks(self, hang: Hang) -> str:
        """Write the Python stacks of the processes in `hang`, as their last heartbeats told, into a file.

        Return a line for the error message: the path of the file, or why it could not be written.
        """
        path = self._folder / f"hang-{time.strftime('%Y%m%d-%H%M%S')}.txt"
        ordered = (*hang.silent, *hang.still, *hang.others)
        rest = [watched for watched in ordered if watched not in hang.at_fault]
        parts = [f"{hang.line(watched)}\n\n{watched.beat.stacks}" for watched in (*hang.at_fault, *rest)]
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("\n\n".join(parts), encoding="utf-8")
        except OSError as error:  # such as a full disk, which may be the reason for the hang
            return f"the Python stacks could not be written: {error}"
        return f"Python stacks: {path}"


def _dead(silent: list[Watched]) -> list[Watched]:
    """Return the processes that have ended. A remote call to each process shows whether it still lives.

    A process that does not answer within five seconds counts as alive.

    silent: processes that have sent no heartbeat for long.
    """
    asked = {one.actor.beat.remote(): one for one in silent}
    ready, _ = ray.wait(list(asked), num_returns=len(asked), timeout=_ANSWER_SECONDS) if asked else ([], [])
    dead = []
    for answer in ready:
        try:
            ray.get(answer)
        except ENDED:
            dead.append(asked[answer])
        except RayError:
            continue  # the process cannot be reached or its call failed, so its state is unknown
    return dead


def _key(actor: ray.actor.ActorHandle) -> str:
    return actor._actor_id.hex()
