"""The keys of an HF ``config.json``, by type."""

import sys
from typing import Any

import torch

from grpo_megatron.errors import UserError, shortened

# Beyond these, a number in config.json is damage: working with it would take for ever.
_MOST = 2**31 - 1
MOST_LAYERS = 10_000
_REQUIRED = object()


class Fields:
    """The keys of config.json by type. A key that is null counts as absent, as transformers writes it.

    Every method raises UserError for a key of another type or out of its range, or, without a default, for its absence.
    """

    def __init__(self, values: dict[str, Any], within: str = ""):
        """within: the key whose object this is, for messages."""
        self._values, self._within = values, f"{within}." if within else ""

    def __len__(self) -> int:
        return len(self._values)

    def _get(self, key: str, default: Any, kinds: tuple[type, ...], what: str) -> Any:
        value = self._values.get(key)
        if value is None:
            if default is _REQUIRED:
                raise UserError(f"key {self._within}{key} is missing")
            return default
        if type(value) not in kinds:
            raise self._refusal(key, what)
        return value

    def _refusal(self, key: str, what: str) -> UserError:
        return UserError(f"{self._within}{key} must be {what}, is {shortened(repr(self._values[key]))}")

    def integer(self, key: str, default: Any = _REQUIRED, most: int = _MOST, least: int = 1) -> Any:
        """From `least` to `most`."""
        what = f"an integer from {least} to {most}"
        value = self._get(key, default, (int,), what)
        if value is not default and not least <= value <= most:
            raise self._refusal(key, what)
        return value

    def number(self, key: str, default: Any = _REQUIRED) -> Any:
        """Finite and greater than 0, as a float."""
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
        """Empty where absent."""
        value = self._get(key, [], (list,), "a list of integers")
        if not all(type(item) is int for item in value):
            raise self._refusal(key, "a list of integers")
        return value

    def object(self, key: str) -> "Fields | None":
        """None where absent or empty."""
        value = self._get(key, None, (dict,), "an object")
        return Fields(value, key) if value else None

    @property
    def nested(self) -> list[str]:
        """The keys whose values are objects."""
        return [key for key, value in self._values.items() if isinstance(value, dict)]


_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def torch_dtype(config: Fields) -> torch.dtype:
    """Of the weights, as config.json states it; float32 where it does not."""
    name = config.text("dtype", None) or config.text("torch_dtype", "float32")
    if name not in _DTYPES:
        raise UserError(f"dtype {shortened(name)!r} is not supported; supported: {', '.join(_DTYPES)}")
    return _DTYPES[name]
