"""Test helpers: run a script of tools/ within this process, find unpacked wheels, fake a full disk, wait."""

import contextlib
import io
import resource
import runpy
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest


def run_tool(name: str, *arguments, status: int = 0, stdin: str | None = None) -> tuple[str, str]:
    """Run `python tools/NAME.py ARGUMENTS` within this process and return (standard output, standard error).

    status: the exit status that the script must end with.
    """
    out, err = io.StringIO(), io.StringIO()
    patches = (
        mock.patch.object(sys, "argv", [f"tools/{name}.py", *map(str, arguments)]),
        mock.patch.object(sys, "stdin", io.StringIO(stdin or "")),
    )
    ended = 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), patches[0], patches[1]:
        try:
            runpy.run_path(f"tools/{name}.py", run_name="__main__")
        except SystemExit as exit_:
            ended = exit_.code or 0
    assert ended == status, out.getvalue() + err.getvalue()
    return out.getvalue(), err.getvalue()


def wait_until(condition, otherwise: str = "", seconds: float = 30.0) -> None:
    """Wait until condition() is true.

    otherwise: message of the AssertionError if it is not true in time.
    """
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, otherwise
        time.sleep(0.02)


def unpacked(requirement: str) -> Path:
    """Return the folder of a wheel that `make install` unpacked.

    requirement: NAME==VERSION, a line of requirements/unpacked.txt. The test is skipped if the folder is
        missing.
    """
    folder = Path(sys.prefix) / "unpacked" / requirement.replace("==", "-")
    if not folder.is_dir():
        pytest.skip(f"{folder} is not there: `make install` could not download {requirement}")
    return folder


@contextlib.contextmanager
def no_file_beyond(size: int) -> Iterator[None]:
    """Make every write beyond `size` bytes of a file fail partway, as on a full disk."""
    usual = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, usual[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, usual)


def default_signals() -> None:
    """Restore the default handlers of SIGINT and SIGHUP, in a process that a test starts (preexec_fn).

    nohup, and shells with background jobs, ignore these signals, and child processes would inherit that.
    """
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
