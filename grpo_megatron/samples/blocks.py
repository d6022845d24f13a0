"""The file of the ledger: blocks of entries that are only appended, each with checksums.

After a line that names the format, the file consists of blocks. A block has a header of 24 bytes, the names
that its entries use for the first time, and entries of 48 bytes (`entries.ENTRY`). All numbers are
little-endian.
"""

import logging
import mmap
import os
import zlib
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from struct import Struct
from typing import BinaryIO

import numpy as np

from grpo_megatron.errors import UserError
from grpo_megatron.files import RowFile, json_text, not_written, reading, writing
from grpo_megatron.paths import file_problem
from grpo_megatron.samples.entries import ENTRY

logger = logging.getLogger(__name__)

LEDGER = "ledger.bin"  # in the run's folder
_FORMAT = (json_text({"format": "grpo_megatron.ledger", "version": 1}) + "\n").encode()
_MAGIC = b"\xf7LB\n"
# _MAGIC, attempt, bytes of the names, number of entries, CRC-32 of what follows, CRC-32 of all before this.
_HEADER = Struct("<4sIIIII")


class DamagedLedger(UserError):
    """A block of the ledger's file is damaged, and sound blocks follow it.

    offset: start of the damaged block in the file, in bytes
    """

    def __init__(self, path: Path, offset: int):
        super().__init__(
            f"{path} is damaged at byte {offset}: this block does not match its checksum, but later blocks "
            "do; restore the file from a copy, or move it away and start over with run.resume=none"
        )
        self.offset = offset


@dataclass(frozen=True)
class LedgerBlock:
    """Entries that were written to the ledger's file together, and the names that no earlier entry uses."""

    start: int
    """Offset of the block in the file, in bytes."""
    end: int
    """Offset of the byte after the block."""
    attempt: int
    """Number of the attempt that wrote it, from 1. Each resume and restart of a run begins a new attempt."""
    names: list[str]
    """Names of filters and reasons that the block adds to the file's list of names. Column `name` of an entry
    is the number of a name in this list, from 1."""
    entries: np.ndarray
    """ENTRY [n], in the order in which they were recorded."""


def packed(attempt: int, names: Sequence[str], entries: np.ndarray) -> bytes:
    """Return the bytes of a block of the ledger's file.

    attempt: number of the run's attempt, from 1.
    names: names of filters, and reasons why samples were left out, that `entries` need and that no earlier
        block has. Line breaks are replaced by blanks.
    entries: ENTRY [n], the entries.
    """
    text = "".join(" ".join(name.splitlines()) + "\n" for name in names).encode("utf-8", "backslashreplace")
    body = text + entries.tobytes()
    start = _HEADER.pack(_MAGIC, attempt, len(text), len(entries), zlib.crc32(body), 0)[:-4]
    return start + zlib.crc32(start).to_bytes(4, "little") + body


def read_blocks(path: Path, start: int = 0) -> Iterator[LedgerBlock]:
    """Yield the blocks of a ledger's file, in order.

    A block that a killed process left unfinished at the end of the file is not yielded.

    start: offset of the first block to read, in bytes; 0: read from the first block of the file.

    Raises DamagedLedger at a damaged block that sound blocks follow. Raises UserError if the file cannot be
    read or is not a ledger.
    """
    if problem := file_problem(path):
        raise UserError(f"{path} {problem}")
    with reading(path), open(path, "rb", buffering=2**20) as file:
        found = file.read(len(_FORMAT))
        if found != _FORMAT[: len(found)]:
            raise UserError(f"{path} is not a ledger that this version can read")
        start = max(start, len(_FORMAT))
        file.seek(start)
        while block := _next(file, start):
            yield block
            start = block.end
        if _sound_header_follows(file, start):
            raise DamagedLedger(path, start)


def _next(file: BinaryIO, start: int) -> LedgerBlock | None:
    """Read the block that begins at the position of the ledger's file, and return it.

    The result is None if the block is damaged, or if the file ends before the end of the block.

    start: the position of the file, in bytes.
    """
    header = file.read(_HEADER.size)
    if len(header) < _HEADER.size or not _is_sound(header):
        return None
    _, attempt, text, count, checksum, _ = _HEADER.unpack(header)
    size = text + count * ENTRY.itemsize
    body = file.read(size)
    if len(body) < size or zlib.crc32(body) != checksum:
        return None
    names = body[:text].decode("utf-8").split("\n")[:-1]
    return LedgerBlock(
        start, start + _HEADER.size + size, attempt, names, np.frombuffer(body, ENTRY, count, offset=text)
    )


def _is_sound(header: bytes) -> bool:
    return header[:4] == _MAGIC and zlib.crc32(header[:-4]) == int.from_bytes(header[-4:], "little")


def _sound_header_follows(file: BinaryIO, start: int) -> bool:
    """Return True if an intact header of a block begins after byte `start` of a ledger's file.

    If a bad block begins at `start`, this tells a damaged file from an unfinished last block.
    """
    if os.fstat(file.fileno()).st_size <= start:
        return False
    with closing(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)) as view:
        place = start
        while (place := view.find(_MAGIC, place + 1)) >= 0:
            if _is_sound(view[place : place + _HEADER.size]):
                return True
    return False


class LedgerFile:
    """Appends blocks to the file of a ledger. The first block creates the file.

    A block that cannot be written, for example because the disk is full, is kept in memory and written
    together with the next one.

    end: offset of the byte after the last block, including blocks that are still in memory
    last: offset of the last block
    """

    def __init__(self, path: Path, last: int = 0, end: int = 0):
        """Continue the file of a ledger after a given block. Whatever follows the block is cut off.

        last, end: offset of the block, and of the byte after the block; 0: there is no block.

        Raises UserError if the file cannot be cut.
        """
        self.path, self.last, self.end = path, last, end
        self._waiting: list[bytes] = []
        if path.exists() and path.stat().st_size > end:
            with writing(path):
                os.truncate(path, end)

    def append(self, attempt: int, names: Sequence[str], entries: np.ndarray) -> None:
        """Append a block to the ledger. If that fails, keep the block in memory for `flush` or the next call.

        The first failure logs a warning. Further ones do not, until a block has been written again.

        attempt: number of the run's attempt, from 1.
        names: the names of filters and reasons that the file does not contain yet.
        entries: ENTRY [n], the entries.
        """
        block, waited = packed(attempt, names, entries), bool(self._waiting)
        if self.end == 0:
            self._waiting.append(_FORMAT)
            self.end = len(_FORMAT)
        self._waiting.append(block)
        self.last, self.end = self.end, self.end + len(block)
        error = self.flush()
        if error and not waited:
            logger.warning(not_written(self.path, error, "the entries are kept in memory and written later"))

    def flush(self) -> OSError | None:
        """Write the blocks that are kept in memory. Return None, or the error if this fails."""
        if self._waiting:
            try:
                with closing(RowFile(self.path)) as file:
                    file.append(b"".join(self._waiting))
            except OSError as error:
                return error
            self._waiting.clear()
        return None
