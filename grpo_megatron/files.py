"""Files that this project writes and reads: JSON, files replaced as a whole, and files that grow by rows.

A replaced file is the old file or the new file, never half of one. A growing file contains whole rows. After
an error, such as a full disk, either kind of file is as it was before.
"""

import errno
import io
import json
import math
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from grpo_megatron.errors import UserError, shortened
from grpo_megatron.paths import file_problem, is_absent

# Bytes per write() call. With larger calls a file system allocates memory in blocks of megabytes. On a
# virtual machine that returns free blocks to its host, these allocations made writing seven times slower.
_WRITE_BYTES = 512 * 2**10


def json_text(value: Any, **layout: Any) -> str:
    """Return `value` as JSON text, with null in place of NaN and infinity.

    json.dumps writes NaN and infinity as bare words, which are not JSON: jq, pandas and browsers refuse
    them. pandas and `float_or_nan` read null as NaN.

    layout: further arguments of json.dumps, such as indent.
    """
    try:
        return json.dumps(value, allow_nan=False, **layout)
    except ValueError:
        return json.dumps(_without_nan(value), allow_nan=False, **layout)


def _without_nan(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {_without_nan(key): _without_nan(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_nan(item) for item in value]
    return value


def float_or_nan(value: float | None) -> float:
    """Convert a number read from JSON: None becomes NaN, because `json_text` writes NaN as null."""
    return math.nan if value is None else value


def read_object(path: str | Path) -> dict[str, Any]:
    """Read a file that contains a JSON object, and return the object.

    Raises UserError, with the file's name, if the file cannot be read or does not contain a JSON object. If
    the file exists but cannot be read, the error's __cause__ is an OSError.
    """
    problem = file_problem(path)
    if problem:
        raise UserError(f"{path} {problem}") from (None if is_absent(path) else OSError(problem))
    with reading(path):
        try:
            raw = Path(path).read_bytes()
        except OSError:
            # On NFS an open file disappears when another one replaces it, which happens to a status file
            # every second. The second attempt reads the new file.
            raw = Path(path).read_bytes()
    return parse_object(raw, str(path))


def parse_object(raw: bytes, where: str) -> dict[str, Any]:
    """Return the JSON object in the UTF-8 bytes `raw`. Raises UserError if `raw` is anything else.

    where: name of the file for the error message, with the line number if the file has an object per line.
    """
    try:
        value = json.loads(raw.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        # The bytes are not JSON or not UTF-8, have an integer of thousands of digits, or are nested too deep.
        raise UserError(f"{where} is not valid JSON: {shortened(error, 200)}") from error
    if not isinstance(value, dict):
        raise UserError(f"{where}: expected a JSON object, got {type(value).__name__}")
    return value


@contextmanager
def new_file(path: Path, durable: bool = True) -> Iterator[IO[bytes]]:
    """Replace the file `path` atomically: yield a temporary file for writing bytes, and rename it afterwards.

    If the process is killed, either the old file or the whole new file exists. After an error, such as the
    OSError of a full disk, the temporary file PATH.tmp is deleted, and the old file is unchanged.

    durable: If True, sync the file to disk before the renaming, so that it also survives a crash of the node.
        This takes time, so False is better for a file that is soon written again.
    """
    aside = path.with_name(f"{path.name}.tmp")
    try:
        with open(aside, "wb") as file:
            yield file
            file.flush()
            if durable:
                os.fsync(file.fileno())
        aside.replace(path)
    except BaseException:
        aside.unlink(missing_ok=True)  # half a file would keep the disk full
        raise


def replace_text(path: Path, text: str, durable: bool = True) -> None:
    """Replace the content of the file `path` atomically by `text`, in UTF-8.

    Raises OSError if writing fails. The old file is then unchanged.

    durable: If True, the new file also survives a crash of the node. See `new_file`.
    """
    with new_file(path, durable) as file:
        file.write(text.encode("utf-8", "backslashreplace"))


def sync_to_disk(path: Path) -> None:
    """Call fsync on a file or a folder. Syncing a folder makes its new file names survive a node's crash."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_buffer(file, data) -> int:
    """Write all bytes of the contiguous buffer `data` to a file that is open for writing in binary mode.

    The data is written in pieces, because one file.write of a large buffer is slow on some machines. Returns
    the size of the data in bytes. Raises OSError, for example if the disk is full.
    """
    rest = data = memoryview(data).cast("B")
    while rest:  # a file without a buffer may write only a part of a piece
        rest = rest[file.write(rest[:_WRITE_BYTES]) :]
    return len(data)


def fill_buffer(buffer, file: io.RawIOBase, offset: int) -> bool:
    """Read bytes from `offset` of a file into a contiguous buffer, until the buffer is full.

    Returns True, or False if the file ends before the buffer is full.

    file: file that is open for reading without buffering.
    """
    rest = memoryview(buffer).cast("B")
    file.seek(offset)
    while rest and (got := file.readinto(rest)):
        rest = rest[got:]
    return not rest


class RowFile:
    """A text file to which whole rows are appended, such as metrics.jsonl.

    A killed process may have left half a row at the end. This class does not remove the half row.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)

    @property
    def size(self) -> int:
        """Size of the file in bytes."""
        return os.fstat(self._descriptor).st_size

    def append(self, data: str | bytes) -> None:
        """Append a text or bytes to the file, either as a whole or not at all.

        Raises OSError if writing fails, for example because the disk is full. The file is then unchanged.
        """
        data = data.encode("utf-8", "backslashreplace") if isinstance(data, str) else data
        before, rest = self.size, memoryview(data)
        try:
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]
        except OSError:
            os.ftruncate(self._descriptor, before)
            raise

    def append_row(self, row: dict[str, Any]) -> None:
        """Append `row` as a line of JSON. Raises OSError if writing fails. The file is then unchanged."""
        self.append(json_text(row) + "\n")

    def close(self) -> None:
        """Close the file. `append` then raises OSError."""
        # Forget the descriptor: its number will soon belong to another file, into which a late row would go.
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:  # the file may have been closed before
            os.close(descriptor)


def numbered(path: Path) -> Path:
    """Return the first of the paths PATH.1, PATH.2, ... that does not exist.

    Callers rename `path` to the result, to keep the old content when a new file or folder takes the name.
    """
    return next(free for n in range(1, 10**6) if not (free := path.with_name(f"{path.name}.{n}")).exists())


def not_written(path: str | Path, error: OSError, consequence: str) -> str:
    """Return the text of a warning that the file `path` could not be written.

    error: the reason.
    consequence: end of the warning, which says what the failure means for the run, such as `the rows are kept
        in memory and written later`.
    """
    return f"{path} could not be written ({error.strerror}); {consequence}"


@contextmanager
def writing(path: str | Path) -> Iterator[None]:
    """Convert an error in the `with` block, which writes the file `path`, into a UserError with the path.

    OSErrors are converted, and so are exceptions of libraries that report a full disk. Any other exception
    passes through.
    """
    try:
        yield
    except Exception as error:
        full = disk_is_full(error)
        if not (full or isinstance(error, OSError)):
            raise
        reason = os.strerror(errno.ENOSPC) if full else getattr(error, "strerror", None) or error
        what = (
            "free some space, then run the same command again to continue"
            if full
            else "check that the disk works and is writable"
        )
        raise UserError(f"{path} cannot be written: {reason}; {what}") from error


@contextmanager
def reading(path: str | Path) -> Iterator[None]:
    """Convert an OSError in the `with` block, which reads `path`, into a UserError with node and path.

    The UserError keeps callers from treating an unreadable file as a missing one. Otherwise, for example, a
    run could start from the beginning although its checkpoint is intact.
    """
    try:
        yield
    except OSError as error:
        raise UserError(
            f"{path} cannot be read on {socket.gethostname()}: {error.strerror or error}; check the file "
            "system there, then run the same command again"
        ) from error


_FULL = ("No space left on device", "inline_container.cc")


def disk_is_full(error: BaseException | None) -> bool:
    """Return True if an exception, or one in its chain of causes and contexts, reports a full disk.

    Callers then ask the user to free some space, instead of reporting an unexpected error.
    """
    while error is not None:
        # safetensors (Rust) and torch.save (C++) report a full disk only in the text of their errors. torch's
        # text is about the incomplete file that it finds afterwards.
        said = str(error)
        if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or any(
            text in said for text in _FULL
        ):
            return True
        error = error.__cause__ or error.__context__
    return False
