"""Records from JSONL and Parquet files, and from HF `datasets` names; every one checked."""

import json
from pathlib import Path
from typing import Any

from grpo_megatron.errors import UserError

HUB_PREFIX = "hf:"


def read_records(source: str, required: list[str]) -> list[dict[str, Any]]:
    """All records of one source, in its order.

    source: a .jsonl or .parquet file, or `hf:NAME[:CONFIG[:SPLIT]]` for what `datasets.load_dataset`
    finds (a hub name where a hub is reachable, or a local folder; SPLIT is train by default).
    Raises UserError for what cannot be read, an empty source, or a record without a required field;
    the message names the record.
    """
    if source.startswith(HUB_PREFIX):
        records = _read_hub(source)
    elif not Path(source).is_file():
        raise UserError(f"{source} does not exist (a file, or hf:NAME[:CONFIG[:SPLIT]] for an HF dataset)")
    elif source.endswith((".jsonl", ".json")):
        return read_jsonl(source, required)
    elif source.endswith(".parquet"):
        records = _read_parquet(source)
    else:
        raise UserError(f"{source}: data must be .jsonl, .parquet or hf:NAME, not {Path(source).suffix or 'without a suffix'}")
    if not records:
        raise UserError(f"{source} has no records")
    for number, record in enumerate(records):
        _check_fields(f"{source}: record {number}", record, required)
    return records


def read_jsonl(path: str, required: list[str]) -> list[dict[str, Any]]:
    """All records of a JSONL file. Raises UserError naming file and line."""
    file = Path(path)
    if not file.is_file():
        raise UserError(f"{path} does not exist")
    records = []
    with file.open("rb") as lines:
        for number, raw in enumerate(lines, start=1):
            try:
                line = raw.decode("utf-8")
            except UnicodeDecodeError as error:
                raise UserError(f"{path}:{number}: not valid UTF-8 ({error.reason} at byte {error.start})") from error
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except json.JSONDecodeError as error:
                raise UserError(f"{path}:{number}: not valid JSON ({error.msg} at column {error.colno})") from error
            if not isinstance(record, dict):
                raise UserError(f"{path}:{number}: expected an object, got {type(record).__name__}")
            _check_fields(f"{path}:{number}", record, required)
            records.append(record)
    if not records:
        raise UserError(f"{path} has no records")
    return records


def _check_fields(where: str, record: dict, required: list[str]) -> None:
    for key in required:
        if record.get(key) is None:
            has = ", ".join(map(repr, record))
            raise UserError(f"{where}: field {key!r} is missing; the record has {has} (see data.prompt_key and its siblings)")


def _read_parquet(path: str) -> list[dict[str, Any]]:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError as error:
        raise UserError(f"{path}: reading Parquet needs pyarrow; pip install pyarrow") from error
    try:
        return parquet.read_table(path).to_pylist()
    except (ArrowException, OSError) as error:
        raise UserError(f"{path} cannot be read: {error}") from error


def _read_hub(source: str) -> list[dict[str, Any]]:
    name, config, split = (*source.removeprefix(HUB_PREFIX).split(":"), "", "")[:3]
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise UserError(f"{source}: this needs the datasets package; pip install datasets") from error
    try:
        return list(load_dataset(name, config or None, split=split or "train"))
    except Exception as error:  # the library raises many kinds; all of them mean this
        raise UserError(f"{source} cannot be loaded ({type(error).__name__}: {error}); is the hub reachable?") from error
