"""Records of Parquet files and of HF `datasets`. Both are read as Arrow tables."""

import os
from bisect import bisect_right
from collections import OrderedDict
from itertools import accumulate
from pathlib import Path
from typing import Any

from grpo_megatron.data.store import FileRecords, Records
from grpo_megatron.data.values import plain_record, shown, without_nulls
from grpo_megatron.errors import UserError
from grpo_megatron.paths import is_absent

HUB_PREFIX = "hf:"
# Cache of decoded row groups, per file: a shuffled order reads the same row groups repeatedly.
_CACHE_BYTES = 256 * 2**20
_LONGEST_LINE = 200  # characters of one message of the library
_LONGEST_REASON = 1000  # characters of a message that lists columns
_SAVED = ("state.json", "dataset_dict.json")  # every folder written by save_to_disk contains one of them


class _ArrowRecords(Records):
    """Base class of records that are read from Arrow tables.

    In an Arrow table, all values of a column with dicts have the same keys. A key that a record lacks is
    there with the value null, like a null that was written on purpose. Chat templates test whether a key is
    present, so the method `meant` removes every key whose value is null.
    """

    def meant(self, value: Any) -> Any:
        return without_nulls(value)


class ParquetRecords(_ArrowRecords, FileRecords):
    """The records of a Parquet file, read one row group at a time.

    A cache keeps up to 256 MiB of decoded row groups in memory, or a single row group if it is larger.
    """

    def __init__(self, path: str):
        super().__init__(path)
        try:
            from pyarrow import parquet
        except ImportError as error:
            raise UserError(
                f"{path}: reading Parquet files requires pyarrow; run `pip install pyarrow`"
            ) from error
        try:
            self._parquet = parquet.ParquetFile(self._file, page_checksum_verification=True)
            names = self._parquet.schema_arrow.names
            metadata = self._parquet.metadata
            rows = [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]
        except Exception as error:  # damaged files raise many kinds of errors
            raise UserError(
                f"{path} cannot be read: {_first_line(error)}; check that it is an intact Parquet file"
            ) from error
        if len(set(names)) < len(names):
            twin = next(name for name in names if names.count(name) > 1)
            raise UserError(f"{path} has several columns named {shown(twin)}; rename all but one")
        if any(count < 0 for count in rows):
            raise UserError(
                f"{path} is corrupt: a row group has a negative number of rows; create the file again"
            )
        self._starts = [0, *accumulate(rows)]
        self._tables: OrderedDict[int, Any] = OrderedDict()

    def __len__(self) -> int:
        return self._starts[-1]

    def _read(self, index: int) -> dict[str, Any]:
        group = bisect_right(self._starts, index) - 1
        return _row(self._table(group), index - self._starts[group], self.where(index))

    def _table(self, group: int):
        """Return a row group as a pyarrow.Table, from the cache or newly decoded.

        group: index of the row group in the file.

        Raises UserError if the row group is damaged.
        """
        if group not in self._tables:
            where = f"{self.source}: the row group that begins at record {self._starts[group]}"
            try:
                table = self._parquet.read_row_group(group)
            except Exception as error:  # damaged files raise many kinds of errors
                raise UserError(
                    f"{where} cannot be read: {_first_line(error)}; create the file again"
                ) from error
            if table.num_rows != self._starts[group + 1] - self._starts[group]:
                raise UserError(
                    f"{where} is corrupt: it has {table.num_rows} rows, but the file's metadata says "
                    f"{self._starts[group + 1] - self._starts[group]}; create the file again"
                )
            self._tables[group] = table
            while (
                len(self._tables) > 1 and sum(table.nbytes for table in self._tables.values()) > _CACHE_BYTES
            ):
                self._tables.popitem(last=False)
        self._tables.move_to_end(group)
        return self._tables[group]


class HubRecords(_ArrowRecords):
    """The records of a data set of the HF `datasets` library, given as `hf:NAME[:CONFIG[:SPLIT]]`.

    NAME is anything that `datasets.load_dataset` accepts, or a folder written by `save_to_disk`. SPLIT is
    `train` if it is not given. The library memory-maps its files, so the records do not all have to fit in
    memory.
    """

    def __init__(self, source: str):
        self.source = source
        # A split may itself contain colons, as in train[:100].
        name, config, split = (*source.removeprefix(HUB_PREFIX).split(":", 2), "", "")[:3]
        try:
            from datasets import load_dataset
        except ImportError as error:
            raise UserError(
                f"{source}: reading a Hugging Face dataset requires the datasets package; run `pip install "
                "datasets`"
            ) from error
        folder = hub_folder(source)
        if folder and is_absent(folder):
            raise UserError(f"{source}: the folder {folder} does not exist; correct the path")
        try:
            if any(Path(name, file).is_file() for file in _SAVED):
                data = _saved(source, name, config, split)
            else:
                data = load_dataset(name, config or None, split=split or "train")
            # The Arrow format leaves images and audio undecoded.
            self._data = data.with_format("arrow")
        except UserError:
            raise
        except Exception as error:  # the library raises many kinds of errors
            hint = "" if folder else "; check the name, and that the hub can be reached"
            raise UserError(f"{source} cannot be loaded ({_messages_with_causes(error)}){hint}") from error

    def __len__(self) -> int:
        return len(self._data)

    def _read(self, index: int) -> dict[str, Any]:
        return _row(self._data[index], 0, self.where(index))


def hub_folder(source: str) -> str | None:
    """Return NAME of a data source `hf:NAME[:...]` if it is a local folder, or None if it is a name on a hub.

    A NAME that begins with /, ./ or ../ counts as a folder even if it does not exist.
    """
    name = source.removeprefix(HUB_PREFIX).split(":", 1)[0]
    return name if os.path.isdir(name) or name.startswith(("/", "./", "../")) else None


def _saved(source: str, folder: str, config: str, split: str):
    """Return the datasets.Dataset that is stored in a folder written by `save_to_disk`.

    source: the data source as the user wrote it, for error messages.
    config, split: configuration and split that the user asked for; "" for none. If the folder has several
        splits and the user asked for none, the split `train` is returned.

    Raises UserError if a configuration is asked for, because such a folder has none. Raises UserError also if
    the folder does not have the split, or has no splits and one is asked for.
    """
    from datasets import Dataset, load_from_disk

    data = load_from_disk(folder)
    if config:
        raise UserError(
            f"{source}: the folder was written by save_to_disk, so it has no configuration {config!r}; use "
            "hf:FOLDER::SPLIT"
        )
    if isinstance(data, Dataset):
        if split:
            raise UserError(
                f"{source}: the folder contains a single dataset written by save_to_disk, so it has no "
                f"splits; use hf:{folder}"
            )
        return data
    if (split or "train") not in data:
        raise UserError(
            f"{source}: the folder has no split {split or 'train'!r}; its splits are "
            f"{', '.join(sorted(data))}; choose one with hf:{folder}::SPLIT"
        )
    return data[split or "train"]


def _messages_with_causes(error: BaseException) -> str:
    """Return the types and messages of an error and of all its causes as one text, for an error message.

    The error comes first, then its cause, then the cause of this cause. A cause often says more than the
    error.
    """
    said: list[str] = []
    while error is not None:
        message = " ".join(str(error).split())
        said.append(f"{type(error).__name__}: {message}"[:_LONGEST_REASON])
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return "; caused by ".join(dict.fromkeys(said))


def _row(table, row: int, where: str) -> dict[str, Any]:
    """Return one row of a pyarrow.Table as a dict of plain Python values.

    row: index of the row.
    where: place of the record, for error messages.

    Raises UserError if the row cannot be decoded or converted.
    """
    try:
        [record] = table.slice(row, 1).to_pylist()
    except Exception as error:  # for example, Python cannot represent a date, or the text is not UTF-8
        raise UserError(
            f"{where} cannot be read: {_first_line(error)}; correct or remove the record"
        ) from error
    return plain_record(record, where)


def _first_line(error: Exception) -> str:
    """Return the first line of a library's error message, or the error's type if it has no message.

    Characters that cannot be printed are replaced by `?`, because the library may quote bytes of a damaged
    file. The line is cut after 200 characters.
    """
    line = (str(error).strip().splitlines() or [type(error).__name__])[0][:_LONGEST_LINE]
    return "".join(character if character.isprintable() else "?" for character in line)
