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
from grpo_megatron.paths import file_problem

# Bytes per write() call. With larger calls a file system allocates memory in blocks of megabytes. On a
# virtual machine that returns free blocks to its host, these allocations made writing seven times slower.
_WRITE_BYTES = 512 * 2**10


def json_text(value: Any, **layout: Any) -> str:
    """Return `value` as JSON text, with null in place of NaN and infinity.

    layout: arguments of json.dumps such as indent.

    JSON has no NaN and no infinity. json.dumps would write them as bare words, which jq, pandas and browsers
    refuse. pandas reads null as NaN, and so does `float_or_nan`. So this function replaces json.dumps in this
    project.
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
    """Return a number that was read from JSON. None becomes NaN: `json_text` writes null for NaN."""
    return math.nan if value is None else value


def read_object(path: str | Path) -> dict[str, Any]:
    """Return the JSON object in a file.

    Raises UserError, which names the file, if the file cannot be read or contains anything but a JSON object.
    If the read itself failed, the error's __cause__ is the OSError.
    """
    problem = file_problem(path)
    if problem:
        raise UserError(f"{path} {problem}")
    with reading(path):
        try:
            raw = Path(path).read_bytes()
        except OSError:
            # On NFS an open file disappears when another one replaces it, which happens to a status file
            # every second. The second attempt reads the new file.
            raw = Path(path).read_bytes()
    return parse_object(raw, str(path))


def parse_object(raw: bytes, where: str) -> dict[str, Any]:
    """Return the JSON object that `raw` contains. Raises UserError if it contains anything else.

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
    """Open NAME.tmp for writing bytes, and rename it to `path` when the `with` block is complete.

    If the process is killed, the old file or the whole new one is there. After an error, such as the OSError
    of a full disk, NAME.tmp is deleted, and the old file is unchanged.

    durable: If True, sync the file to disk before the renaming, so that the same holds if the node crashes.
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
    """Write `text` to the file `path` as UTF-8, with `new_file`.

    Raises OSError if that fails. The old file is then unchanged.
    """
    with new_file(path, durable) as file:
        file.write(text.encode("utf-8", "backslashreplace"))


def sync_to_disk(path: Path) -> None:
    """Call fsync on a file or a folder. In a synced folder, new names survive a crash of the node."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_buffer(file, data) -> int:
    """Write all bytes of a contiguous buffer to a file that is open for writing in binary mode.

    Returns the number of bytes written. Replaces file.write, which is slow for large buffers on some
    machines. Raises OSError, for example if the disk is full.
    """
    data = memoryview(data).cast("B")
    for first in range(0, len(data), _WRITE_BYTES):
        file.write(data[first : first + _WRITE_BYTES])
    return len(data)


def fill_buffer(buffer, file: io.RawIOBase, offset: int) -> bool:
    """Fill a contiguous buffer from byte `offset` of a file that is open for reading without buffering.

    Returns True, or False if the file ends before the buffer is full.
    """
    rest = memoryview(buffer).cast("B")
    file.seek(offset)
    while rest and (got := file.readinto(rest)):
        rest = rest[got:]
    return not rest


class RowFile:
    """A file that is only appended to, such as metrics.jsonl.

    A killed process may have left half a row at the end. This class does not remove it.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)

    @property
    def size(self) -> int:
        """Size in bytes."""
        return os.fstat(self._descriptor).st_size

    def append(self, data: str | bytes) -> None:
        """Append all of a text or of bytes to the file, or nothing.

        Raises OSError if the disk is full. The file is then unchanged.
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
        """Append `row` as a line of JSON. Raises OSError if the disk is full, with the file unchanged."""
        self.append(json_text(row) + "\n")

    def close(self) -> None:
        """Close the file. Appending to it afterwards raises OSError."""
        # Forget the descriptor: its number will soon belong to another file, into which a late row would go.
        descriptor, self._descriptor = self._descriptor, -1
        os.close(descriptor)


def numbered(path: Path) -> Path:
    """Return the first of PATH.1, PATH.2, ... that does not exist.

    Callers rename `path` to it when they need the name for something new and must not lose the old content.
    """
    return next(free for n in range(1, 10**6) if not (free := path.with_name(f"{path.name}.{n}")).exists())


def not_written(path: str | Path, error: OSError, consequence: str) -> str:
    """Return a warning for the user that a file could not be written.

    consequence: end of the sentence: what this means for the run, such as `its rows wait until they can be`.
    """
    return f"{path} could not be written ({error.strerror}); {consequence}"


@contextmanager
def writing(path: str | Path) -> Iterator[None]:
    """Convert errors of writing within the `with` block into a UserError that names `path`.

    These errors are OSErrors, and other exceptions that report a full disk. Any other exception passes
    through.
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
    """Convert an OSError within the `with` block into a UserError that names this node and `path`.

    Callers thus do not take a file that cannot be read for damaged or absent. Otherwise, a run could begin
    from the start although its checkpoint is intact.
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

    The command line then asks the user to make room, rather than reporting an unexpected error.
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
