"""Typed access to the keys of a Hugging Face ``config.json``."""

import sys
from typing import Any

import torch

from grpo_megatron.errors import UserError, shortened

# A larger number in config.json means that the file is damaged. Computing with it could take forever.
_MOST = 2**31 - 1
MOST_LAYERS = 10_000
_REQUIRED = object()


class Fields:
    """Typed reader of the keys of a Hugging Face config.json, or of an object nested in it.

    A key with the value null counts as absent, because transformers writes absent keys as null. Every method
    raises UserError if the value has another type or is out of range, or if a key without a default is
    absent.
    """

    def __init__(self, values: dict[str, Any], within: str = ""):
        """Create a reader of the JSON object `values`.

        within: key of config.json under which this object is, for error messages; empty for the whole file.
        """
        self._values, self._within = values, f"{within}." if within else ""

    def __len__(self) -> int:
        return len(self._values)

    def _get(self, key: str, default: Any, kinds: tuple[type, ...], what: str) -> Any:
        value = self._values.get(key)
        if value is None:
            if default is _REQUIRED:
                raise UserError(f"the key {self._within}{key} is missing; add it")
            return default
        if type(value) not in kinds:
            raise self._refusal(key, what)
        return value

    def _refusal(self, key: str, what: str) -> UserError:
        return UserError(f"{self._within}{key} must be {what}, but is {shortened(repr(self._values[key]))}")

    def integer(self, key: str, default: Any = _REQUIRED, most: int = _MOST, least: int = 1) -> Any:
        """Return the integer under `key`, or `default` if the key is absent.

        most, least: the allowed range of the integer, inclusive.

        Raises UserError if the value is not such an integer, or if the key is absent and there is no default.
        """
        what = f"an integer from {least} to {most}"
        value = self._get(key, default, (int,), what)
        if value is not default and not least <= value <= most:
            raise self._refusal(key, what)
        return value

    def number(self, key: str, default: Any = _REQUIRED) -> Any:
        """Return the number under `key` as a float, or `default` if the key is absent.

        Raises UserError if the value is not a finite number greater than 0, or if the key is absent and there
        is no default.
        """
        what = "a finite number greater than 0"
        value = self._get(key, default, (int, float), what)
        if value is default:
            return default
        if not 0 < value <= sys.float_info.max:
            raise self._refusal(key, what)
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        return self._get(key, default, (bool,), "true or false")

    def text(self, key: str, default: Any) -> Any:
        return self._get(key, default, (str,), "text")

    def integers(self, key: str) -> list[int]:
        """Return the list of integers under `key`, or an empty list if the key is absent."""
        value = self._get(key, [], (list,), "a list of integers")
        if not all(type(item) is int for item in value):
            raise self._refusal(key, "a list of integers")
        return value

    def texts(self, key: str) -> list[str]:
        """Return the list of texts under `key`, or an empty list if the key is absent."""
        value = self._get(key, [], (list,), "a list of texts")
        if not all(type(item) is str for item in value):
            raise self._refusal(key, "a list of texts")
        return value

    def object(self, key: str) -> "Fields | None":
        """Return a reader of the JSON object under `key`, or None if the object is absent or empty."""
        value = self._get(key, None, (dict,), "an object")
        return Fields(value, key) if value else None

    def replaced(self, changes: dict[str, Any]) -> "Fields":
        """Return a reader of the same object with other values of some keys. A value of None removes one."""
        return Fields({**self._values, **changes}, self._within.removesuffix("."))

    def values(self) -> dict[str, Any]:
        """Return a copy of the object as a dict."""
        return dict(self._values)

    @property
    def nested(self) -> list[str]:
        """Names of the keys whose values are JSON objects."""
        return [key for key, value in self._values.items() if isinstance(value, dict)]


_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def torch_dtype(config: Fields) -> torch.dtype:
    """Return the dtype of the weights that config.json names, or float32 if the file names none.

    Raises UserError for a dtype other than float32, bfloat16 and float16.
    """
    name = config.text("dtype", None) or config.text("torch_dtype", "float32")
    if name not in _DTYPES:
        raise UserError(f"dtype {shortened(name)!r} is not supported; only {', '.join(_DTYPES)} can be used")
    return _DTYPES[name]
