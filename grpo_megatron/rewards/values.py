"""Conversion of reward values from functions, servers and environments to floats.

A number is anything that Python can convert to a float: an int, a Decimal, a Fraction, a scalar of NumPy or
torch. A text is not a number, even if it looks like one. A valid number is also finite, and at most LARGEST
in absolute value.
"""

import math
import reprlib
from collections.abc import Iterable
from itertools import islice
from typing import Any

# Maximum number of further numbers per response. Each becomes a curve of its own in the logs.
MAX_COMPONENTS = 100
MAX_NAME_LENGTH = 100
# Advantages are float32, whose largest value is 3e38. A sum of rewards must stay below that.
LARGEST = 1e30


class NoReward(Exception):
    """A reward function, server or environment returned an invalid value.

    The message says what is valid. The code that catches the error adds which function, server or environment
    it was.
    """


def read_reward(value: Any, from_json: bool = False) -> dict[str, float]:
    """Convert the value that a reward function returned to {"reward": number, name: further number, ...}.

    value: a number, or a dict of numbers with the key "reward". The further numbers are for the logs.
    from_json: True if the value comes from a server. Then true and false are not accepted as numbers. A
        Python function may return a bool, such as the result of a comparison.

    Raises NoReward if the dict has no key "reward", if a value is not a number, not finite or above LARGEST
    in absolute value, if there are more than MAX_COMPONENTS further numbers, or if the name of one is too
    long or not printable.
    """
    if not isinstance(value, dict):
        value = {"reward": value}
    if "reward" not in value:
        raise NoReward("it must return a number, or a dict with 'reward'")
    reward = _number(value["reward"], "the reward", from_json)
    return {"reward": reward} | read_components(
        {name: value[name] for name in value if name != "reward"}, from_json
    )


def read_components(value: dict, from_json: bool = False) -> dict[str, float]:
    """Convert the numbers that are logged beside a reward to floats, and return {name: float}.

    value: {name: number}.
    from_json: True if true and false are not accepted as numbers.

    Raises NoReward if a value is not a number, not finite or above LARGEST in absolute value, if there are
    more than MAX_COMPONENTS numbers, or if a name does not consist of 1 to MAX_NAME_LENGTH printable
    characters.
    """
    if len(value) > MAX_COMPONENTS:
        raise NoReward(
            f"it must return at most {MAX_COMPONENTS} numbers in addition to the reward, not {len(value)}"
        )
    for name in value:
        if not isinstance(name, str) or not name.isprintable() or not 0 < len(name) <= MAX_NAME_LENGTH:
            raise NoReward(
                f"the name of a number must be 1 to {MAX_NAME_LENGTH} printable characters, but is "
                f"{shown(name)}"
            )
    return {str(name): _number(number, shown(name), from_json) for name, number in value.items()}


def read_rewards(value: Any, count: int) -> list[float]:
    """Convert the value that a group reward returned to a list of floats, one for each response.

    value: what the group reward returned, such as a list or an array.
    count: number of responses.

    Raises NoReward if the value is not an iterable of exactly `count` valid numbers, each finite and at most
    LARGEST in absolute value.
    """
    must = f"it must return {count} finite numbers"
    if not isinstance(value, Iterable) or isinstance(value, (str, bytes, dict)):
        raise NoReward(must)
    found = list(islice(value, count + 1))  # it may be endless
    if len(found) != count:
        raise NoReward(f"{must}, not {'more' if len(found) > count else len(found)}")
    return [_number(number, f"number {index}", False) for index, number in enumerate(found)]


def shown(value: Any) -> str:
    """Return a short text without control characters that shows any value in an error message."""
    try:
        text = _QUOTES.repr(value)
    except Exception:  # Python refuses, for example, to write an int with too many digits
        return f"a value of type {type(value).__name__}"
    return text if text.isprintable() else repr(text)


_QUOTES = reprlib.Repr()
_QUOTES.maxstring = _QUOTES.maxlong = 80
_QUOTES.maxother = 200  # such as a StepResult


def _number(value: Any, name: str, from_json: bool) -> float:
    """Return a value as a finite float.

    name: name of the value in the message.
    from_json: True if true and false are not accepted as numbers.

    Raises NoReward if the value is not a number, is not finite, or exceeds LARGEST in absolute value.
    """
    try:
        if hasattr(value, "item"):
            value = value.item()  # scalar of NumPy or torch; an array of several numbers raises an error
        if isinstance(value, (str, bytes)) or (from_json and isinstance(value, bool)):
            raise TypeError
        number = float(value)
    except OverflowError:
        number = math.inf
    except Exception:  # an object of a user's class may raise anything
        raise NoReward(
            f"{name} must be a number, but is {shown(value)} of type {type(value).__name__}"
        ) from None
    if not abs(number) <= LARGEST:
        raise NoReward(f"{name} must be finite, and at most {LARGEST:g} in absolute value")
    return number
