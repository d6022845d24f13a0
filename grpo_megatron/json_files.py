"""JSON files: what is written here, every JSON reader accepts; what is read may be damaged."""

import json
import math
from pathlib import Path
from typing import Any

from grpo_megatron.errors import UserError, shortened
from grpo_megatron.paths import file_problem, reading


def json_text(value: Any, **layout: Any) -> str:
    """Return `value` as JSON text. Replaces json.dumps in this project, because of NaN and infinity.

    layout: arguments of json.dumps such as indent.

    JSON has no NaN and no infinity. json.dumps would write them as bare words, which jq, pandas and browsers
    refuse. Here they become null. pandas reads null as NaN, and so does `float_or_nan`.
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

    Raises UserError if the file cannot be read; the error's __cause__ is then an OSError if the read itself
    failed. Raises UserError also if the file contains anything but a JSON object. The message names the file.
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
