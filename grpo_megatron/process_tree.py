"""Linux process trees: adopting orphans, and killing all descendants of this process."""

import ctypes
import os
import signal
import sys
import time
from pathlib import Path

import psutil

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
# Index of the start time among the fields of /proc/PID/stat that follow the process's name. It is field 22 in
# `man proc_pid_stat`.
_STARTED = 19


def start_mark(pid: object) -> str | None:
    """Return the start time of a process as `BOOT_ID:CLOCK_TICKS_SINCE_BOOT`; None if no process has the pid.

    The pid and this text together identify a process, even if the pid is later given to another process.
    Unlike psutil's create_time, the text does not change when the clock is set.

    pid: the process's pid. For anything but an integer, the result is None.
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
    """Return True if the process that once had this pid and start time still runs on this machine.

    The pid alone is not enough, because it may have been given to another process. `pid` and `started` are
    read from files. If one of them is invalid, the result is False.

    started: what `start_mark` returned for the process.
    """
    mark = start_mark(pid)
    return mark is not None and mark == started


def adopt_orphans() -> None:
    """Make this process the parent of each descendant whose own parent dies.

    Otherwise such an orphan would become a child of init, and `kill_descendants` would not find the orphan.
    Raises OSError if the kernel refuses.
    """
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")


def end_with_parent(parent: int) -> None:
    """Make the kernel kill this process when its parent ends, so that a helper process is not left behind.

    If the parent has already ended, this process exits at once.

    parent: pid of the process that started this process.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(1)


def kill_descendants(seconds: float = 30.0) -> list[str]:
    """Send SIGKILL to all descendants of this process, until none is left or the time is over.

    Returns the descendants that still exist after `seconds`, each as `name (pid)`; empty if all have ended.

    Call this function only in a process that is about to end. The function collects the exit statuses of all
    children, so other code that waits for a child would not get the child's status.
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
    """Return how many processes the kernel's out-of-memory killer has killed since boot; 0 if not known.

    If the count rises during a run, lack of memory probably explains why a process ended by SIGKILL.
    """
    try:
        with open("/proc/vmstat", encoding="ascii") as file:
            return next((int(line.split()[1]) for line in file if line.startswith("oom_kill ")), 0)
    except OSError:
        return 0
