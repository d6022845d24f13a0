"""Processes as Linux sees them: whose orphans come to whom, and ending all that descends from this one."""

import ctypes
import os
import signal
import sys
import time
from pathlib import Path

import psutil

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_CLOCK_SECONDS = 2.0  # by which the start of one process may differ, asked at two times
_STARTED = 19  # of /proc/PID/stat, counted from the first field behind the name; `man proc_pid_stat` has it as field 22


def start_mark(pid: object) -> str | None:
    """When the process of this number began: `ID of the machine's boot:clock ticks since`; None where this machine has none.

    It stays the same when the clock is set. The time since the epoch, which psutil tells, does not: the kernel counts from the boot, whose
    time is what the clock says now less the time since.
    """
    if type(pid) is not int:
        return None
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    # A process gives itself its name, in which there may be blanks and brackets.
    return f"{_boot_id()}:{stat.rpartition(')')[2].split()[_STARTED]}"


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:  # some sandboxes have none; that the same number begins in the same tick of another boot is unlikely enough
        return ""


def is_running(pid: object, started: object) -> bool:
    """Whether a process of this machine has this number and this start_mark; False for what are none. The number may have been given to
    another process.

    Earlier versions recorded seconds since the epoch, which are compared as they are: a clock that was set meanwhile makes them differ.
    """
    if isinstance(started, str):
        return start_mark(pid) == started
    try:
        return abs(psutil.Process(pid).create_time() - started) < _CLOCK_SECONDS
    except (psutil.Error, TypeError, ValueError):
        return False


def adopt_orphans() -> None:
    """From now on a process whose parent dies becomes a child of this one, if it descends from it: none can get away."""
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")


def end_with_parent(parent: int) -> None:
    """From now on this process is killed when the one that has started it ends, whose number is `parent`. If that has ended before, this
    one exits."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(1)


def kill_descendants(seconds: float = 30.0) -> list[str]:
    """SIGKILL to everything below this process, until nothing is left. Returns what still was there after `seconds`: `name (pid)`.

    Only for a process that is about to end: it takes the exit statuses of its children from whoever else waits for them.
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
        time.sleep(0.02)  # what they had started meanwhile is found in the next round
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
    """How many processes of this machine the kernel has killed since its start because there was no memory; 0 if it does not say."""
    try:
        with open("/proc/vmstat", encoding="ascii") as file:
            return next((int(line.split()[1]) for line in file if line.startswith("oom_kill ")), 0)
    except OSError:
        return 0
