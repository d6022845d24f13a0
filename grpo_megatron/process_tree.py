"""Linux process trees: adopting orphans, and killing all descendants of this process."""

import ctypes
import os
import signal
import sys
import time
from pathlib import Path

import psutil

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_CLOCK_SECONDS = 2.0  # tolerance between two readings of one process's start time
# index of the start time in /proc/PID/stat, counted from the first field after the name (field 22 in `man
# proc_pid_stat`)
_STARTED = 19


def start_mark(pid: object) -> str | None:
    """Return a mark of when process `pid` started: `BOOT_ID:CLOCK_TICKS_SINCE_BOOT`; None if it cannot be
    told.

    The mark stays the same when the clock is set. The time since the epoch that psutil reports does not: it
    is computed from the time of the boot, which the kernel derives from the present clock.
    """
    if type(pid) is not int:
        return None
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    # A process chooses its own name, which may contain blanks and brackets.
    return f"{_boot_id()}:{stat.rpartition(')')[2].split()[_STARTED]}"


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    # Some sandboxes have no boot id. A process with the same pid is unlikely to start in the same tick of
    # another boot.
    except OSError:
        return ""


def is_running(pid: object, started: object) -> bool:
    """Return True if a process of this machine has this pid and start_mark; False also for invalid values.

    The pid alone is not enough, because it may have been given to another process. Earlier versions recorded
    seconds since the epoch. These are compared as they are, so they differ if the clock was set in between.
    """
    if isinstance(started, str):
        return start_mark(pid) == started
    try:
        return abs(psutil.Process(pid).create_time() - started) < _CLOCK_SECONDS
    except (psutil.Error, TypeError, ValueError):
        return False


def adopt_orphans() -> None:
    """Make this process the new parent of each descendant whose parent dies, so that none can escape."""
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")


def end_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent ends. Exit if the parent has already ended.

    parent: pid of the process that started this one.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(1)


def kill_descendants(seconds: float = 30.0) -> list[str]:
    """Send SIGKILL to all descendants of this process until none is left.

    Returns those that are still there after `seconds`, as `name (pid)`. Only a process that is about to end
    may call this: it collects the exit statuses of its children, which other code may be waiting for.
    """
    deadline = time.monotonic() + seconds
    while left := _living_descendants():
        if time.monotonic() > deadline:
            return [f"{process.name()} ({process.pid})" for process in left if process.is_running()]
        for process in left:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        time.sleep(0.02)  # the next round finds what they started in the meantime
    return []


def _living_descendants() -> list[psutil.Process]:
    _reap()
    living = []
    for process in psutil.Process().children(recursive=True):
        try:
            if process.status() != psutil.STATUS_ZOMBIE:
                living.append(process)
        except psutil.NoSuchProcess:
            continue
    return living


def _reap() -> None:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return


def killed_for_memory() -> int:
    """Return how many processes the kernel has killed since boot because memory was short; 0 if it does not
    say.
    """
    try:
        with open("/proc/vmstat", encoding="ascii") as file:
            return next((int(line.split()[1]) for line in file if line.startswith("oom_kill ")), 0)
    except OSError:
        return 0
