"""Records of Parquet files and of HF `datasets`, both of which are Arrow tables when they are read."""

from bisect import bisect_right
from collections import OrderedDict
from itertools import accumulate
from typing import Any

from grpo_megatron.data.store import FileRecords, Records
from grpo_megatron.data.values import plain_record, shown
from grpo_megatron.errors import UserError

HUB_PREFIX = "hf:"
# Row groups that are kept decoded, of each file: a shuffled order comes back to them.
_CACHE_BYTES = 256 * 2**20
_LONGEST_LINE = 200  # characters of a message of the library


class ParquetRecords(FileRecords):
    """A Parquet file, read by row group. In memory are groups of up to 256 MiB together, or one that is larger."""

    def __init__(self, path: str):
        super().__init__(path)
        try:
            from pyarrow import parquet
        except ImportError as error:
            raise UserError(f"{path}: reading Parquet needs pyarrow; pip install pyarrow") from error
        try:
            self._parquet = parquet.ParquetFile(self._file, page_checksum_verification=True)
            names = self._parquet.schema_arrow.names
            metadata = self._parquet.metadata
            rows = [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]
        except Exception as error:  # the library raises many kinds for damaged files; all of them mean this
            raise UserError(f"{path} cannot be read: {_line(error)}") from error
        if len(set(names)) < len(names):
            twin = next(name for name in names if names.count(name) > 1)
            raise UserError(f"{path} has several columns {shown(twin)}; rename all but one")
        if any(count < 0 for count in rows):
            raise UserError(f"{path} cannot be read: a row group has a negative number of rows")
        self._starts = [0, *accumulate(rows)]
        self._tables: OrderedDict[int, Any] = OrderedDict()

    def __len__(self) -> int:
        return self._starts[-1]

    def _read(self, number: int) -> dict[str, Any]:
        group = bisect_right(self._starts, number) - 1
        return _row(self._table(group), number - self._starts[group], self.where(number))

    def _table(self, group: int):
        """The group as a pyarrow.Table, decoded or from the cache."""
        if group not in self._tables:
            where = f"{self.source}: records from {self._starts[group]}"
            try:
                table = self._parquet.read_row_group(group)
            except Exception as error:  # as above
                raise UserError(f"{where} cannot be read: {_line(error)}") from error
            if table.num_rows != self._starts[group + 1] - self._starts[group]:
                raise UserError(f"{where} cannot be read: {table.num_rows} rows are there, not as many as the file says")
            self._tables[group] = table
            while len(self._tables) > 1 and sum(table.nbytes for table in self._tables.values()) > _CACHE_BYTES:
                self._tables.popitem(last=False)
        self._tables.move_to_end(group)
        return self._tables[group]


class HubRecords(Records):
    """`hf:NAME[:CONFIG[:SPLIT]]`, what `datasets.load_dataset` finds; the library maps it from its files."""

    def __init__(self, source: str):
        self.source = source
        # A split may have colons of its own: train[:100].
        name, config, split = (*source.removeprefix(HUB_PREFIX).split(":", 2), "", "")[:3]
        try:
            from datasets import load_dataset
        except ImportError as error:
            raise UserError(f"{source}: this needs the datasets package; pip install datasets") from error
        try:
            # The Arrow format leaves pictures and sounds undecoded.
            self._data = load_dataset(name, config or None, split=split or "train").with_format("arrow")
        except Exception as error:  # the library raises many kinds; all of them mean this
            raise UserError(f"{source} cannot be loaded ({type(error).__name__}: {error}); is the hub reachable?") from error

    def __len__(self) -> int:
        return len(self._data)

    def _read(self, number: int) -> dict[str, Any]:
        return _row(self._data[number], 0, self.where(number))


def _row(table, row: int, where: str) -> dict[str, Any]:
    """One row of a pyarrow.Table in plain Python."""
    try:
        [record] = table.slice(row, 1).to_pylist()
    except Exception as error:  # text that is not UTF-8, dates that Python does not have, and more
        raise UserError(f"{where} cannot be read: {_line(error)}") from error
    return plain_record(record, where)


def _line(error: Exception) -> str:
    """The first line of the message, which may quote bytes of the file, or else the kind of error."""
    line = (str(error).strip().splitlines() or [type(error).__name__])[0][:_LONGEST_LINE]
    return "".join(character if character.isprintable() else "?" for character in line)
