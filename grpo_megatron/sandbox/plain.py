"""Encoding of plain data as JSON, including some types that JSON lacks.

The result of a program is only accepted as plain data. An object of one of the program's own classes could
pretend to be equal to anything.
"""

import json
import math
from collections.abc import Callable
from typing import Any

_SEQUENCES = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}


def dumps(value: Any, other: Callable[[Any], Any] | None = None) -> bytes:
    """Encode plain data as JSON, from which `loads` restores it, including types that JSON lacks.

    Plain data are None, bools, numbers, strings and bytes, and dicts, lists, tuples and sets of plain data.
    Arrays and scalars of NumPy become lists and numbers.

    other: function that encodes any other value as a list [name, content]. `name` must differ from all names
        that this module writes, such as "tuple". If `other` is None, any other value raises TypeError.
    """
    return json.dumps(_encoded(value, other)).encode()


def loads(text: bytes, other: Callable[[list], Any] | None = None) -> Any:
    """Decode plain data that `dumps` has encoded, and return the value.

    other: function that decodes a list [name, content] which the function `other` of `dumps` has made. If
        it is None, such a list raises ValueError.

    Raises ValueError, TypeError, RecursionError or another error if the text was not written by `dumps`.
    """
    return _decoded(json.loads(text), other)


def _encoded(value: Any, other: Callable[[Any], Any] | None) -> Any:
    if type(value).__module__ == "numpy" and hasattr(value, "tolist"):
        value = value.tolist()
    if value is None or isinstance(value, bool):
        return value
    for kind in (int, str):
        if isinstance(value, kind):
            return kind(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else ["float", str(float(value))]
    if isinstance(value, complex):
        return ["complex", str(complex(value))]
    if isinstance(value, bytes):
        return ["bytes", value.hex()]
    if isinstance(value, dict):
        return ["dict", [[_encoded(key, other), _encoded(item, other)] for key, item in dict.items(value)]]
    for name, kind in _SEQUENCES.items():
        if isinstance(value, kind):
            return [name, [_encoded(item, other) for item in value]]
    if other is None:
        raise TypeError(f"{type(value).__name__} is not plain data")
    return other(value)


def _decoded(value: Any, other: Callable[[list], Any] | None) -> Any:
    if not isinstance(value, list):
        return value
    name, content = value
    if name in _SEQUENCES:
        return _SEQUENCES[name](_decoded(item, other) for item in content)
    if name == "dict":
        return {_decoded(key, other): _decoded(item, other) for key, item in content}
    if name in ("float", "complex"):
        return {"float": float, "complex": complex}[name](content)
    if name == "bytes":
        return bytes.fromhex(content)
    if other is None:
        raise ValueError(f"unknown kind {name!r}")
    return other(value)
