"""Checks of paths that a user gave, and functions that write files durably."""

import errno
import os
import socket
import stat
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from grpo_megatron.errors import UserError

T = TypeVar("T")


def within(seconds: float, call: Callable[[], T]) -> T:
    """Return call(), run in a thread that is abandoned after `seconds`.

    There is no other way to get away from a file system or a service that hangs. Raises TimeoutError, which
    is an OSError, and whatever `call` raises.
    """
    answer: Future[T] = Future()

    def run() -> None:
        try:
            answer.set_result(call())
        except BaseException as error:
            answer.set_exception(error)

    threading.Thread(target=run, name="within", daemon=True).start()
    try:
        return answer.result(seconds)
    except TimeoutError as error:
        raise TimeoutError(str(error) or f"it was not done within {seconds:.0f} s") from error


def file_problem(path: str | Path) -> str | None:
    """Return what is wrong with `path` as a file to read, or None.

    The text is the end of a sentence, such as `does not exist`.
    """
    mode = _mode(path)
    if isinstance(mode, str):
        return mode
    if stat.S_ISDIR(mode):
        return "is a folder, not a file"
    if not stat.S_ISREG(mode):
        return "is not a regular file"  # reading a pipe or a device may never end
    return None if os.access(path, os.R_OK) else "cannot be read: no permission"


def folder_problem(path: str | Path) -> str | None:
    """Return what is wrong with `path` as a folder to read from, or None; see file_problem."""
    mode = _mode(path)
    if isinstance(mode, str):
        return mode
    if not stat.S_ISDIR(mode):
        return "is a file, not a folder"
    return None if os.access(path, os.R_OK | os.X_OK) else "cannot be read: no permission"


def output_folder_problem(path: str | Path) -> str | None:
    """Return what is wrong with `path` as a folder to write to, or None; see file_problem.

    The folder need not exist. It must then be possible to create it in the nearest folder above that exists.
    The check creates a temporary folder there, because permissions say nothing about /proc or a full disk.
    """
    there = nearest_folder(path)
    if problem := folder_problem(there):
        return problem if there == Path(path).absolute() else f"cannot be made: {there} {problem}"
    try:
        with tempfile.TemporaryDirectory(prefix=".grpo-megatron-", dir=there):
            return None
    except OSError as error:
        return f"cannot be written to: {error.strerror}"


def nearest_folder(path: str | Path) -> Path:
    """Return `path` itself if it exists, else the nearest folder above it that does."""
    path = Path(path).absolute()
    return next((place for place in (path, *path.parents) if not is_absent(place)), path)


def output_file_problem(path: str | Path) -> str | None:
    """Return what is wrong with `path` as a file to write, or None. The file may exist already.

    See output_folder_problem.
    """
    if is_absent(path):
        problem = output_folder_problem(parent := Path(path).absolute().parent)
        return problem and f"cannot be written: {parent} {problem}"
    return file_problem(path) or (None if os.access(path, os.W_OK) else "cannot be written: no permission")


def is_absent(path: str | Path) -> bool:
    """Return True if nothing is at `path`.

    Something of the wrong kind or a link that leads nowhere does not count as absent.
    """
    return _mode(path) == _ABSENT


_ABSENT = "does not exist"


def _mode(path: str | Path) -> int | str:
    try:
        return os.stat(path).st_mode
    except FileNotFoundError:
        return "is a link that leads nowhere" if os.path.islink(path) else _ABSENT
    except NotADirectoryError:
        return "lies below a file as if that were a folder"
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    except ValueError as error:  # not a valid path, as with a zero byte or a lone surrogate
        return f"is not a path: {error}"


def sync_to_disk(path: Path) -> None:
    """Call fsync on a file, or on a folder to make its list of files durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_text(path: Path, text: str) -> None:
    """Write a UTF-8 file atomically: if the process is killed, the old or the new file is there. Raises
    OSError.
    """
    new = path.with_name(f"{path.name}.new")
    try:
        new.write_text(text, encoding="utf-8")
        sync_to_disk(new)
        new.replace(path)
    except OSError:
        new.unlink(missing_ok=True)  # half a file would keep the disk full
        raise


def numbered(path: Path) -> Path:
    """Return the first of PATH.1, PATH.2, ... that does not exist: a place to move `path` to without losing
    anything.
    """
    return next(free for n in range(1, 10**6) if not (free := path.with_name(f"{path.name}.{n}")).exists())


@contextmanager
def writing(path: str | Path) -> Iterator[None]:
    """Convert errors of the disk into a UserError that names `path`. Other exceptions pass through."""
    try:
        yield
    except Exception as error:
        full = disk_is_full(error)
        if not (full or isinstance(error, OSError)):
            raise
        reason = os.strerror(errno.ENOSPC) if full else getattr(error, "strerror", None) or error
        what = (
            "make room and call the same command again, which continues"
            if full
            else "is the disk writable, and in order?"
        )
        raise UserError(f"{path} cannot be written: {reason}; {what}") from error


@contextmanager
def reading(path: str | Path) -> Iterator[None]:
    """Convert an OSError into a UserError that names the node and `path`.

    The content of a file that cannot be read is unknown, so it must not be taken for damaged or absent.
    """
    try:
        yield
    except OSError as error:
        raise UserError(
            f"{path} cannot be read on {socket.gethostname()}: {error.strerror or error}; see to the file "
            "system there, then call the same command again"
        ) from error


_FULL = ("No space left on device", "inline_container.cc")


def disk_is_full(error: BaseException | None) -> bool:
    """Return True if an exception, or one in its chain of causes and contexts, is about a full disk."""
    while error is not None:
        # safetensors (Rust) and torch.save (C++) report it in the text of their errors only. torch's text is
        # about the incomplete file that it finds afterwards.
        said = str(error)
        if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or any(
            text in said for text in _FULL
        ):
            return True
        error = error.__cause__ or error.__context__
    return False
