"""The hang detector: the driver watches whether processes make progress, and kills those that hang."""

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import ray
from ray.exceptions import RayError
from ray.experimental import internal_kv

from grpo_megatron.cluster.hang import Hang, Watched, at_work, find_hang
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
_FLUSH_SECONDS = 5.0
_STACKS_SECONDS = 20.0
# How long a living process may take to answer when it is asked after a long silence. A call to a dead process
# fails at once.
_ANSWER_SECONDS = 5.0


class ProcessHangs(ProcessLost):
    """Processes made no progress in a call for longer than cluster.hang_timeout, so they were killed."""


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
