"""JSON, written and read: what is written here any reader of JSON takes, and what is read may be damaged."""

import json
import math
from pathlib import Path
from typing import Any

from grpo_megatron.errors import UserError, shortened
from grpo_megatron.paths import file_problem, reading


def json_text(value: Any, **layout: Any) -> str:
    """Return `value` as JSON; the one way in which this project writes it.

    layout: arguments of json.dumps such as indent.

    JSON has no NaN and no infinity, which Python would write as bare words that jq, pandas and browsers
    refuse. They become null, as in other writers of JSON. pandas reads that as NaN, and our own readers do by
    `float_or_nan`.
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
    """Return a number that `json_text` wrote: null stands for one that was not finite."""
    return math.nan if value is None else value


def read_object(path: str | Path) -> dict[str, Any]:
    """The JSON object of a file. Raises UserError that names the file for one that cannot be read or holds anything else.

    Its cause is an OSError where that came while the file was read.
    """
    problem = file_problem(path)
    if problem:
        raise UserError(f"{path} {problem}")
    with reading(path):
        try:
            raw = Path(path).read_bytes()
        except OSError:
            # On NFS, the file that was opened goes when another takes its place, as a status does every second. The second look finds that.
            raw = Path(path).read_bytes()
    return parse_object(raw, str(path))


def parse_object(raw: bytes, where: str) -> dict[str, Any]:
    """where: the file, and the line if it has several objects, for the message of the UserError."""
    try:
        value = json.loads(raw.decode("utf-8"))
    except (
        ValueError,
        RecursionError,
    ) as error:  # no JSON, no UTF-8, an integer of thousands of digits, nested too deep
        raise UserError(f"{where} is not valid JSON: {shortened(error, 200)}") from error
    if not isinstance(value, dict):
        raise UserError(f"{where}: expected a JSON object, got {type(value).__name__}")
    return value
