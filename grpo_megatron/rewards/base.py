"""The built-in rewards, and finding one by name."""

import importlib
import re
import sys
from collections.abc import Callable

from grpo_megatron.errors import UserError

BUILT_IN = ("exact_match", "math")


def exact_match(extract: str | None) -> Callable[..., float]:
    """1.0 if the response equals the answer, ignoring surrounding white space.

    extract: a regular expression; its last match in the response (group 1 if it has groups) is
    compared instead of the whole response, and a response without a match scores 0.
    """
    try:
        pattern = re.compile(extract) if extract else None
    except re.error as error:
        raise UserError(f"reward.extract={extract!r} is not a regular expression: {error}") from error

    def reward(prompt: str, response: str, answer: str, record: dict) -> float:
        if pattern is not None:
            matches = list(pattern.finditer(response))
            if not matches:
                return 0.0
            response = matches[-1].group(1 if pattern.groups else 0)
        return float(response.strip() == answer.strip())

    return reward


def math(extract: str | None) -> Callable[..., float]:
    """1.0 if math-verify finds the response's final answer equal to the reference.

    Understands plain numbers, LaTeX and \\boxed{}; equality is mathematical (1/2 = 0.5).
    """
    from math_verify import parse, verify

    def reward(prompt: str, response: str, answer: str, record: dict) -> float:
        # The library's own time limits use the alarm signal, which the reward worker needs.
        gold = parse(f"${answer}$", parsing_timeout=None)
        if not gold:
            raise ValueError(f"math-verify finds no answer in the reference {answer!r}")
        return float(verify(gold, parse(response, parsing_timeout=None), timeout_seconds=None))

    return reward


def resolve_reward(name: str, extract: str | None = None) -> Callable[..., float | dict[str, float]]:
    """exact_match, math, or `module:function` (found from the working directory too)."""
    if name == "exact_match":
        return exact_match(extract)
    if name == "math":
        return math(extract)
    if extract:
        raise UserError(f"reward.extract only goes with exact_match, not with {name}")
    module_name, separator, attribute = name.partition(":")
    if not separator:
        raise UserError(f"reward.function={name!r} is unknown; use {', '.join(BUILT_IN)}, or module:function")
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        function = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError) as error:
        raise UserError(f"reward.function={name!r} cannot be imported: {error}") from error
    if not callable(function):
        raise UserError(f"reward.function={name!r} is not a function")
    return function
