"""Running a script of tools/ within the tests' process, which starts in no time; finding what `make install` unpacked; a full disk;
waiting."""

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
    """(standard output, standard error) of `python tools/NAME.py ARGUMENTS`, which must end with this exit status."""
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
    """For condition() to be true. otherwise: what is wrong if it is not by then."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, otherwise
        time.sleep(0.02)


def unpacked(requirement: str) -> Path:
    """The folder of a wheel of requirements/unpacked.txt, NAME==VERSION; the test skips where `make install` could not have it."""
    folder = Path(sys.prefix) / "unpacked" / requirement.replace("==", "-")
    if not folder.is_dir():
        pytest.skip(f"{folder} is not there: `make install` could not download {requirement}")
    return folder


@contextlib.contextmanager
def no_file_beyond(size: int) -> Iterator[None]:
    """What this process writes beyond `size` bytes of a file fails in its middle, as on a disk that is full."""
    usual = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, usual[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, usual)


def default_signals() -> None:
    """In a process that a test is about to start (preexec_fn): it hears of signals that whoever started the tests has ignored, as nohup
    and shells do for jobs in the background."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
