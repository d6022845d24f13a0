"""Rewards that compare the answer in a response with the reference answer."""

from collections.abc import Callable
from dataclasses import replace
from decimal import Decimal
from typing import Any, Literal

from grpo_megatron.config.options import FilledText, Pattern, dataclass, option
from grpo_megatron.config.reward import ANSWER_PLACES, RewardConfig
from grpo_megatron.rewards.answers import (
    LETTERS,
    answer_key,
    find_answer,
    find_letter,
    normalise_answer,
    text_finder,
    whole,
)
from grpo_megatron.rewards.limits import time_limit
from grpo_megatron.rewards.numerals import plain_numbers, with_exponents
from grpo_megatron.rewards.terms import Setup

Compare = Callable[..., float | dict[str, float]]


@dataclass
class _Places:
    """Options of one term of the reward that replace reward.answer_from and reward.response_from for it."""

    answer_from: list[Literal[ANSWER_PLACES]] | None = option(None, "see reward.answer_from")
    response_from: list[Literal[ANSWER_PLACES]] | None = option(None, "see reward.response_from")


@dataclass
class _Extract(_Places):
    extract: Pattern | None = option(None, "see reward.extract")


@dataclass
class _Letters(_Places):
    letters: FilledText = option(LETTERS, "letters of the choices")


def exact_match(setup: Setup) -> Compare:
    """Make the reward function `exact_match`: 1.0 if the response's answer is a reference answer, else 0.0.

    The texts must be equal. The response's answer is the last match of reward.extract (its group 1 if it has
    groups). If reward.extract is not set, it is the text that reward.response_from finds. If neither option
    is set, the answer is the whole response without surrounding white space. A response without an answer
    scores 0.

    A reference answer is the text that reward.answer_from finds in the record's answer. The reward function
    raises ValueError if nothing is found there.
    """
    config = _config_of_term(setup, _Extract)
    find = text_finder(config) or whole

    def reward(prompt: str, response: str, answer: str | list[str], record: dict) -> float:
        found = find(response)
        return float(found is not None and found in _references(answer, config))

    reward.check_record = lambda answer, record: _references(answer, config)
    return reward


def choice(setup: Setup) -> Compare:
    """Make the reward function `choice`: 1.0 if the response chooses the right letter, else 0.0.

    This is the reward for multiple-choice questions. answers.find_letter finds the letter in the response,
    such as after `the answer is` or in an <answer> tag, and the right letter in each reference answer. A
    reference answer may also begin with the letter, such as `A) yes`. If reward.response_from is set, only
    the text that this setting finds in the response is searched. The reward function raises ValueError if a
    reference answer contains no letter.
    """
    config, letters = _config_of_term(setup, _Letters), setup.options(_Letters).letters

    def golds(answer: str | list[str], record: dict) -> list[str]:
        # First the phrases such as `the answer is B`, because an explanation may begin with the article A.
        found = [
            find_letter(gold, letters) or find_letter(gold, letters, is_answer=True)
            for gold in _references(answer, config)
        ]
        if None in found:
            raise ValueError(
                f"the reference answer {str(answer)[-80:]!r} contains none of the letters {letters}"
            )
        return found

    def reward(prompt: str, response: str, answer: str | list[str], record: dict) -> float:
        has_place = bool(config.response_from)
        text = find_answer(response, config.response_from) if has_place else response
        return float(
            text is not None and find_letter(text, letters, is_answer=has_place) in golds(answer, record)
        )

    reward.check_record = golds
    return reward


def math(setup: Setup) -> Compare:
    r"""Make the reward function `math`: 1.0 if the response's answer equals a reference answer, else 0.0.

    The answers are compared mathematically by the library math-verify: 1/2 equals 0.5. A comparison that
    takes longer than 5 s scores 0.0 and sets the component `timed_out` to 1.

    reward.response_from says where the answer is in the response. If it is not set, math-verify searches the
    response for plain numbers, LaTeX and \boxed{}. Before math-verify reads a text, numerals.plain_numbers
    writes the numbers in it in one spelling, without commas that separate thousands. The reward function
    raises ValueError if math-verify cannot read a reference answer.
    """
    from math_verify import verify

    config = _config_of_term(setup, _Places)

    def reward(prompt: str, response: str, answer: str | list[str], record: dict) -> float | dict[str, float]:
        golds = _references(answer, config)
        if config.response_from:
            found = find_answer(response, config.response_from)
            if found is None:
                return 0.0
            if answer_key(found) in map(answer_key, golds):
                return 1.0  # true for most right answers; parsing costs milliseconds
            response = f"${normalise_answer(found)}$"
        else:
            response = plain_numbers(response)
        parsed = [_parsed(f"${normalise_answer(gold)}$") for gold in golds]
        if not all(parsed):
            raise ValueError(
                f"math-verify cannot read the reference answer {golds[parsed.index([])]!r}; write "
                "it as a number or as LaTeX"
            )
        # The library's own time limits use the alarm signal, which the reward worker needs. A response must
        # not end a run, so a response that takes too long to compare counts as wrong.
        with time_limit(_COMPARE_SECONDS) as limit:
            answered = _parsed(response)
            same = (
                verify(gold, answered, float_rounding=_decimals(gold), timeout_seconds=None)
                for gold in parsed
            )
            return float(any(same))
        return {"reward": 0.0, "timed_out": float(limit.reached)}

    # The answer is not parsed here, because that takes milliseconds per record and may never end.
    reward.check_record = lambda answer, record: _references(answer, config)
    return reward


_COMPARE_SECONDS = 5.0


def _parsed(text: str) -> list[Any]:
    """Return the mathematical expressions that math-verify finds in a text, as its `parse` returns them.

    A text that contains a number such as `2e-1` is read twice, with the meanings 2e - 1 and 0.2.
    """
    from math_verify import parse

    readings = dict.fromkeys((text, with_exponents(text)))
    return [expression for reading in readings for expression in parse(reading, parsing_timeout=None)]


def _decimals(gold: list[Any]) -> int:
    """Return the number of decimals to which answers are rounded before they are compared.

    It is 6, or more if the reference answer is so small that 6 decimals would be fewer than 5 significant
    digits.

    gold: the parsed reference answer, as `_parsed` returned it.
    """
    from sympy import Number

    number = gold[0]
    if not isinstance(number, Number) or not number.is_finite or number.is_zero:
        return 6
    return max(6, 4 - Decimal(str(number.evalf(4))).adjusted())


def _config_of_term(setup: Setup, options: type) -> RewardConfig:
    """Return the configuration section `reward`, in which the term's own options override the general ones.

    setup: configuration and term.
    options: the dataclass of the term's options, such as _Places.
    """
    own = {
        name: value
        for name, value in vars(setup.options(options)).items()
        if value is not None and name != "letters"
    }
    return replace(setup.config, **own)


def _references(answer: str | list[str], config: RewardConfig) -> list[str]:
    """Extract the final answers from a record's reference texts, as reward.answer_from says.

    answer: one reference text, or a list of alternatives.
    config: section `reward` of the configuration.

    Raises ValueError if a reference text contains no answer.
    """
    references = []
    for text in [answer] if isinstance(answer, str) else answer:
        found = find_answer(text, config.answer_from)
        if found is None:
            raise ValueError(f"no answer found by reward.answer_from={config.answer_from} in {text[-80:]!r}")
        references.append(found)
    return references
