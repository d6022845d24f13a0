"""Base classes of records. A record is read from its source each time it is requested."""

import os
import weakref
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import xxhash

from grpo_megatron.errors import UserError
from grpo_megatron.files import json_text
from grpo_megatron.progress import moved

_DIGESTED_BYTES = 2**18  # bytes read at a time for a digest


class Records(Sequence[dict[str, Any]]):
    """The records of one data source in order, each a dict of plain Python values.

    The values can be written as JSON. A record is read from the source each time it is requested, so the
    records are not kept in memory. Requesting a damaged record raises a UserError that names the record.
    """

    source: str

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self._read(range(len(self))[index])

    def where(self, index: int) -> str:
        """Return the place of a record, for messages: source and index, such as `data.json: record 7`."""
        return f"{self.source}: record {index}"

    def meant(self, value: Any) -> Any:
        """Return a record's value without what only the file format added to it.

        For example, Arrow gives a dict every key that occurs in any record, with the value null if the record
        lacks the key; the subclass for Arrow removes all keys with null. This base class returns the value
        unchanged, because most formats add nothing.
        """
        return value

    def digest(self) -> str:
        """Return the XXH3-128 digest of all records as hexadecimal text.

        A resumed run compares digests to tell whether the records have changed. All records are read for
        this, which takes much less time than tokenizing and checking them.
        """
        digest = xxhash.xxh3_128()
        for record in self:
            digest.update(json_text(record, sort_keys=True, default=str).encode())
            moved()
        return digest.hexdigest()

    @abstractmethod
    def _read(self, index: int) -> dict[str, Any]: ...


class FileRecords(Records):
    """Base class of the records of one file.

    The file stays open and must not change, because the positions of records in it are stored. Requesting a
    record after the file has changed raises UserError.
    """

    def __init__(self, path: str):
        self.source = path
        try:
            self._file = open(path, "rb")  # noqa: SIM115 - closed with this object
        except OSError as error:
            raise UserError(
                f"{path} cannot be read: {error.strerror}; correct the path or its permissions"
            ) from error
        weakref.finalize(self, self._file.close)
        self._stamp = self._now()

    def _now(self) -> tuple[int, int]:
        status = os.fstat(self._file.fileno())
        return status.st_size, status.st_mtime_ns

    def digest(self) -> str:
        """Return the XXH3-128 digest of the file's bytes as hexadecimal text."""
        digest, place = xxhash.xxh3_128(), 0
        while block := os.pread(self._file.fileno(), _DIGESTED_BYTES, place):
            digest.update(block)
            place += len(block)
            moved()
        return digest.hexdigest()

    def __getitem__(self, index: int) -> dict[str, Any]:
        if self._now() != self._stamp:
            raise UserError(
                f"{self.source} has changed since it was opened; restart the command, and write changes to "
                "a new file while it runs"
            )
        return super().__getitem__(index)
