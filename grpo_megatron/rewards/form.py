"""Rewards for the form of a response: its pattern, its tags, its length."""

import math
import re
from collections.abc import Callable, Mapping

from grpo_megatron.config.options import FilledText, Pattern, dataclass, option
from grpo_megatron.errors import UserError
from grpo_megatron.rewards.terms import Setup


@dataclass
class _Regex:
    pattern: Pattern = option("", "regular expression; . matches newlines too")


def regex(setup: Setup) -> Callable[..., float]:
    """Make the reward function `regex`: 1.0 if the pattern matches the whole response, else 0.0.

    White space around the response is ignored.
    """
    pattern = re.compile(setup.options(_Regex).pattern, re.DOTALL)

    def reward(prompt: str, response: str, answer: str | list[str], record: dict) -> float:
        return float(pattern.fullmatch(response.strip()) is not None)

    return reward


@dataclass
class _Tags:
    tags: list[FilledText] = option(["think", "answer"], "names of the tags, in their order")
    opened: bool = option(False, "the prompt ends with the first tag, so that the response does not open it")


def tags(setup: Setup) -> Callable[..., float]:
    """Make the reward function `format`: 1.0 if the response consists of the configured tags, else 0.0.

    By default, the response must have the form `<think>...</think><answer>...</answer>`. Only white space may
    stand before, between and after the pairs of tags. Each tag must occur exactly once, with content that is
    not blank. With the option `opened`, the prompt ends with the first opening tag, and the response begins
    after it.

    Raises UserError if the option `tags` is empty.
    """
    options = setup.options(_Tags)
    if not options.tags:
        raise UserError(f"{setup.term.key}.tags is empty; it must contain at least one tag")
    # Empty contents are checked afterwards. As part of the pattern, the check took quadratic time if there
    # was text between the tags.
    parts = [rf"<{re.escape(tag)}>(.*?)</{re.escape(tag)}>" for tag in options.tags]
    pattern = re.compile(r"\s*".join(parts), re.DOTALL)
    marks = [f"<{slash}{tag}>" for tag in options.tags for slash in ("", "/")]
    before = f"<{options.tags[0]}>" if options.opened else ""

    def reward(prompt: str, response: str, answer: str | list[str], record: dict) -> float:
        text = before + response.strip()
        found = pattern.fullmatch(text) if all(text.count(mark) == 1 for mark in marks) else None
        return float(found is not None and all(part.strip() for part in found.groups()))

    return reward


@dataclass
class _LinearLength:
    target: int | None = option(None, "the length that scores 1", "tokens", ge=0)
    width: int | None = option(None, "distance from target at which a length scores 0", "tokens", gt=0)
    shorter_is_free: bool = option(False, "lengths below target score 1")


def linear_length(setup: Setup) -> Callable[..., float]:
    """Make the reward function `linear_length`, which depends on the length of the response in tokens.

    The reward is 1 at the length `target`. From there it falls linearly to 0 at the lengths target - width
    and target + width, and stays 0 beyond them. With the option `shorter_is_free`, it is 1 at all lengths
    below `target`.

    Raises UserError if the option `target` or `width` is not set.
    """
    options = setup.options(_LinearLength)
    if options.target is None or options.width is None:
        raise UserError(
            f"{setup.term.key}: linear_length requires the options target and width (both in tokens)"
        )

    def reward(prompt: str, response: str, answer: str | list[str], record: dict, tokens: int) -> float:
        beyond = tokens - options.target
        return 1.0 if options.shorter_is_free and beyond < 0 else max(0.0, 1 - abs(beyond) / options.width)

    return reward


@dataclass
class _CosineLength:
    right: FilledText | None = option(None, "the term that says whether a response is right")
    right_from: float = option(1.0, "a response is right if that term's value is at least this")
    longest: int | None = option(None, "length from which on a response counts as cut off", "tokens", gt=0)
    right_short: float = option(1.0, "value of a right response without tokens")
    right_long: float = option(0.5, "value of a right response of almost the longest length")
    wrong_short: float = option(-1.0, "value of a wrong response without tokens")
    wrong_long: float = option(0.0, "value of a wrong response of almost the longest length")
    exceeded: float = option(-1.0, "value of a response of the longest length or more")


def cosine_length(setup: Setup) -> Callable[..., float]:
    """Make the reward function `cosine_length`: a cosine of the response's length.

    It follows arXiv:2502.03373 section 3.2. By default, a right response scores higher if it is short, and a
    wrong response scores higher if it is long. The option `right` names the term of the reward that says
    whether a response is right. A response of `longest` tokens or more was probably cut off, and scores
    `exceeded`.

    Raises UserError if the option `right` or `longest` is not set.
    """
    options = setup.options(_CosineLength)
    if options.right is None or options.longest is None:
        raise UserError(
            f"{setup.term.key}: cosine_length requires the options right (name of a term) and longest "
            "(in tokens)"
        )

    def reward(
        prompt: str,
        response: str,
        answer: str | list[str],
        record: dict,
        tokens: int,
        components: Mapping[str, float],
    ) -> float:
        if tokens >= options.longest:
            return options.exceeded
        right = components[options.right] >= options.right_from
        short, long = (
            (options.right_short, options.right_long) if right else (options.wrong_short, options.wrong_long)
        )
        return long + (short - long) * (1 + math.cos(math.pi * tokens / options.longest)) / 2

    reward.needs = (options.right,)
    return reward
