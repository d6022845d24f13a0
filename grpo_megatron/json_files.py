"""JSON objects from files that others wrote, or that a killed process left half-written."""

import json
from pathlib import Path
from typing import Any

from grpo_megatron.errors import UserError, shortened
from grpo_megatron.paths import file_problem, reading


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
    except (ValueError, RecursionError) as error:  # no JSON, no UTF-8, an integer of thousands of digits, nested too deep
        raise UserError(f"{where} is not valid JSON: {shortened(error, 200)}") from error
    if not isinstance(value, dict):
        raise UserError(f"{where}: expected a JSON object, got {type(value).__name__}")
    return value
