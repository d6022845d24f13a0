"""Records of JSON files.

Only the position of each record is kept in memory; its content is read on request.
"""

import json
import os
import re
from array import array
from collections.abc import Iterator
from typing import Any

from grpo_megatron.data.store import FileRecords
from grpo_megatron.data.values import plain_record, shown
from grpo_megatron.errors import UserError

_BOM = b"\xef\xbb\xbf"
_BLOCK = 2**18  # bytes read at a time
# A whole string, a structural character, or the opening quote of a string that continues after the block.
_MARK = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"|[\[\]{},]|"', re.DOTALL)


class JsonRecords(FileRecords):
    """The records of a JSON Lines file, or of a JSON file that contains an array of objects.

    A .json file is read as an array if its first character is `[`. In any other file, each line that is not
    blank is a record. Files are UTF-8, with or without a byte-order mark. Only the position of each record is
    kept in memory, which takes 24 bytes per record.
    """

    def __init__(self, path: str):
        super().__init__(path)
        self._starts, self._ends, self._lines = array("q"), array("q"), array("q")
        first = self._file.read(_BLOCK)
        begin = len(_BOM) if first.startswith(_BOM) else 0
        if first.startswith((b"\xff\xfe", b"\xfe\xff")):
            raise UserError(f"{path}: the file is UTF-16 (by its byte-order mark); save it as UTF-8")
        self._is_array = path.lower().endswith(".json") and first[begin:].lstrip()[:1] == b"["
        self._file.seek(begin)
        for start, end, line in self._elements(begin) if self._is_array else self._text_lines(begin):
            self._starts.append(start)
            self._ends.append(end)
            self._lines.append(line)

    def __len__(self) -> int:
        return len(self._starts)

    def where(self, index: int) -> str:
        return super().where(index) if self._is_array else f"{self.source}:{self._lines[index]}"

    def _read(self, index: int) -> dict[str, Any]:
        start = self._starts[index]
        raw = os.pread(self._file.fileno(), self._ends[index] - start, start)
        where = self.where(index)
        return plain_record(_parse(raw, where), where)

    def _text_lines(self, start: int) -> Iterator[tuple[int, int, int]]:
        """Yield (start byte, end byte, line number) of each line that is not blank. Lines count from 1.

        start: byte offset of the first line. The end byte is exclusive.
        """
        for line_number, line in enumerate(self._file, start=1):
            if line.strip():
                yield start, start + len(line), line_number
            start += len(line)

    def _elements(self, base: int) -> Iterator[tuple[int, int, int]]:
        """Yield (start byte, end byte, 0) of each element of the file's array. The end byte is exclusive.

        The 0 takes the place of the line number that `_text_lines` yields. No line number is needed, because
        messages name an element of an array by its index.

        base: byte offset of the array's beginning, after a byte-order mark.

        Only the brackets and commas around the elements are examined here. An element that is not valid JSON
        is found when it is read. The library ijson cannot be used, because it does not report the position of
        an element in the file.

        Raises UserError if the file ends within the array, or has more text after it.
        """
        depth = start = index = 0
        buffer, block = b"", _BLOCK
        while chunk := self._file.read(block):
            buffer += chunk
            done = len(buffer)
            for mark in _MARK.finditer(buffer):
                kind, position = mark[0], base + mark.start()
                if kind == b'"':
                    done = mark.start()
                    break
                depth += (kind in (b"[", b"{")) - (kind in (b"]", b"}"))
                if depth == 0 or (kind == b"," and depth == 1):
                    if depth or index or not self._is_blank(start, position):
                        yield start, position, 0
                    index, start = index + 1, position + 1
                    if depth == 0:
                        self._check_end(start)
                        return
                elif depth == 1 and start == 0:
                    start = position + 1
            if not done:
                block *= 2  # a string is longer than the buffer; doubling keeps the work linear
            base, buffer = base + done, buffer[done:]
        raise UserError(
            f"{self.source}: record {index}: the file ends in the middle of the array; it is probably "
            "truncated, so copy or create it again"
        )

    def _is_blank(self, start: int, end: int) -> bool:
        """Return True if the bytes [start, end) of the file are only white space, and fewer than 256 KiB."""
        return end - start < _BLOCK and not os.pread(self._file.fileno(), end - start, start).strip()

    def _check_end(self, position: int) -> None:
        """Raise UserError if anything but white space follows the array.

        position: byte offset of the first byte after the array.
        """
        self._file.seek(position)
        while chunk := self._file.read(_BLOCK):
            if chunk.strip():
                raise UserError(
                    f"{self.source}: there is more text after the end of the array; if each line is a "
                    "record, give the file the extension .jsonl"
                )


def _parse(raw: bytes, where: str) -> dict[str, Any]:
    """Return the JSON object in these bytes. Raises UserError if they contain anything else.

    where: place of the record, for error messages.
    """
    try:
        record = json.loads(raw.decode("utf-8"), object_pairs_hook=_with_unique_keys)
    except UnicodeDecodeError as error:
        raise UserError(
            f"{where}: not valid UTF-8 ({error.reason} at byte {error.start}); save the file as UTF-8"
        ) from error
    except json.JSONDecodeError as error:
        raise UserError(
            f"{where}: not valid JSON ({error.msg} at column {error.colno}); correct the record"
        ) from error
    except RecursionError as error:
        raise UserError(f"{where}: the record is nested too deeply; flatten it") from error
    except ValueError as error:  # raised by _with_unique_keys, or by a number with thousands of digits
        raise UserError(f"{where}: {error}") from error
    if not isinstance(record, dict):
        raise UserError(
            f"{where}: expected a JSON object, got {type(record).__name__}; write each record as {{...}}"
        )
    return record


def _with_unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object as a dict. Raises ValueError if a key occurs twice.

    Without this check, the json module would silently keep the last value.

    pairs: the (key, value) pairs of the object.
    """
    record = dict(pairs)
    if len(record) < len(pairs):
        seen: set[str] = set()
        twin = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise ValueError(f"key {shown(twin)} occurs twice in the same object; remove one of them")
    return record
