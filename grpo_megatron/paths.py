"""Checks of paths that a user gave, before they are read or written."""

import os
import stat
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")


def within(seconds: float, call: Callable[[], T]) -> T:
    """Call a function with a time limit of `seconds`, and return its result.

    The function runs in its own thread. After the limit, TimeoutError (an OSError) is raised, and the thread
    is abandoned, because a call that hangs in a file system or a service cannot be interrupted. Errors that
    the function raises are passed on.
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
        raise TimeoutError(str(error) or f"no result within {seconds:.0f} s") from error


def file_problem(path: str | Path) -> str | None:
    """Return the reason why `path` cannot be read as a file; None if it can be read.

    The text is the end of a sentence that begins with the path, such as `does not exist`.
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
    """Return the reason why `path` cannot be read as a folder; None if it can be read.

    The text is the end of a sentence that begins with the path, such as `does not exist`.
    """
    mode = _mode(path)
    if isinstance(mode, str):
        return mode
    if not stat.S_ISDIR(mode):
        return "is a file, not a folder"
    return None if os.access(path, os.R_OK | os.X_OK) else "cannot be read: no permission"


def output_folder_problem(path: str | Path) -> str | None:
    """Return the reason why no files can be written to the folder `path`; None if they can be written.

    The text is the end of a sentence that begins with the path, such as `cannot be written to: Permission
    denied`. If the folder does not exist, the nearest existing folder above it is checked. The check creates
    and deletes a temporary folder, because permission bits do not reveal a full disk, or a file system such
    as /proc in which nothing can be created.
    """
    there = nearest_folder(path)
    if problem := folder_problem(there):
        return problem if there == Path(path).absolute() else f"cannot be created: {there} {problem}"
    try:
        with tempfile.TemporaryDirectory(prefix=".grpo-megatron-", dir=there):
            return None
    except OSError as error:
        return f"cannot be written to: {error.strerror}"


def nearest_folder(path: str | Path) -> Path:
    """Return `path` if it exists, else the nearest folder above it that exists, as an absolute path.

    A path that cannot be examined, for example because of missing permission, counts as existing.
    """
    path = Path(path).absolute()
    return next((place for place in (path, *path.parents) if not is_absent(place)), path)


def is_absent(path: str | Path) -> bool:
    """Return True if there is no file, folder or link at `path`.

    A symbolic link with a missing target counts as present, and so does a path that cannot be examined, for
    example because of missing permission.
    """
    return _mode(path) == _ABSENT


_ABSENT = "does not exist"


def _mode(path: str | Path) -> int | str:
    try:
        return os.stat(path).st_mode
    except FileNotFoundError:
        return "is a broken symbolic link" if os.path.islink(path) else _ABSENT
    except NotADirectoryError:
        return "cannot exist, because part of the path is a file, not a folder"
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    except ValueError as error:  # not a valid path, as with a zero byte or a lone surrogate
        return f"is not a valid path: {error}"
