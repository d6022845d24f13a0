"""Opening of record sources: JSON and Parquet files, and data sets of the HF `datasets` library."""

from pathlib import Path

from grpo_megatron.data.arrow_records import HUB_PREFIX, HubRecords, ParquetRecords, hub_folder
from grpo_megatron.data.json_records import JsonRecords
from grpo_megatron.data.store import Records
from grpo_megatron.data.values import required
from grpo_megatron.errors import UserError

__all__ = ["HUB_PREFIX", "hub_folder", "open_records", "read_records"]

_COMPRESSED = (".gz", ".zst", ".bz2", ".xz", ".zip")


def open_records(source: str) -> Records:
    """Open a data source, and return its records. The records themselves are not checked yet.

    source: a .jsonl, .json or .parquet file, or `hf:NAME[:CONFIG[:SPLIT]]`. NAME is what
        `datasets.load_dataset` accepts: a name on the hub, if a hub is reachable, or a local folder. SPLIT is
        train by default.

    Raises UserError if the source cannot be read or has no records.
    """
    suffix = Path(source).suffix.lower()
    if source.startswith(HUB_PREFIX):
        records: Records = HubRecords(source)
    elif Path(source).is_dir():
        raise UserError(
            f"{source} is a folder, not a file; give the files in it, or hf:{source} to load it as a "
            "Hugging Face dataset"
        )
    elif not Path(source).is_file():
        raise UserError(
            f"{source} does not exist; give the path of a file, or hf:NAME[:CONFIG[:SPLIT]] for a Hugging "
            "Face dataset"
        )
    elif suffix in (".jsonl", ".json"):
        records = JsonRecords(source)
    elif suffix == ".parquet":
        records = ParquetRecords(source)
    elif suffix in _COMPRESSED:
        raise UserError(
            f"{source} is compressed, so single records cannot be read from it; decompress the file first"
        )
    else:
        raise UserError(
            f"{source}: data must be a .jsonl, .json or .parquet file or hf:NAME, but this file has the "
            f"extension {suffix or '(none)'}"
        )
    if not len(records):
        raise UserError(f"{source} contains no records; give a file or data set with at least one")
    return records


def read_records(source: str, keys: list[str]) -> Records:
    """Open a data source, check every record by reading it once, and return the records.

    source: a file or a data set, in a form that `open_records` accepts.
    keys: fields that every record must have, with a value other than null.

    Raises UserError if the source cannot be read or has no records, or if a record is damaged or lacks one of
    the fields.
    """
    records = open_records(source)
    for index, record in enumerate(records):
        for key in keys:
            required(record, key, records.where(index))
    return records
