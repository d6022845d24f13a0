"""Rewards that compare a response's answer with the reference."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from grpo_megatron.config.limits import Text
from grpo_megatron.config.options import option
from grpo_megatron.config.reward import ANSWER_PLACES, RewardConfig
from grpo_megatron.rewards.answers import answer_finder, find_answer, find_letter, normalise_number, whole
from grpo_megatron.rewards.limits import time_limit
from grpo_megatron.rewards.terms import Setup

Compare = Callable[..., float | dict[str, float]]


@dataclass
class _Places:
    """Of a term, where they are others than reward.answer_from and reward.response_from."""

    answer_from: list[str] | None = option(None, "see reward.answer_from", choices=ANSWER_PLACES)
    response_from: list[str] | None = option(None, "see reward.response_from", choices=ANSWER_PLACES)


@dataclass
class _Extract(_Places):
    extract: str | None = option(None, "see reward.extract", text=Text.pattern)


@dataclass
class _Letters(_Places):
    letters: str = option("ABCDEFGHIJ", "of the choices")


def exact_match(setup: Setup) -> Compare:
    """1.0 if the response's answer is the reference answer, or one of several, letter by letter.

    The answer is what reward.extract matches last (group 1 if it has groups), or what
    reward.response_from finds, or else the whole response without surrounding white space; a
    response in which it is not found scores 0.
    """
    config = _with_own(setup, _Extract)
    find = answer_finder(config) or whole

    def reward(prompt: str, response: str, answer: str | list[str], record: dict) -> float:
        found = find(response)
        return float(found is not None and found in _references(answer, config))

    reward.check_record = lambda answer, record: _references(answer, config)
    return reward


def choice(setup: Setup) -> Compare:
    """1.0 if the response chooses the reference's letter, or one of several; see answers.find_letter."""
    config, letters = _with_own(setup, _Letters), setup.options(_Letters).letters

    def golds(answer: str | list[str], record: dict) -> list[str]:
        found = [find_letter(gold, letters) for gold in _references(answer, config)]
        if None in found:
            raise ValueError(f"the reference answer {str(answer)[-80:]!r} has none of the letters {letters}")
        return found

    def reward(prompt: str, response: str, answer: str | list[str], record: dict) -> float:
        text = find_answer(response, config.response_from) if config.response_from else response
        return float(text is not None and find_letter(text, letters) in golds(answer, record))

    reward.check_record = golds
    return reward


def math(setup: Setup) -> Compare:
    """1.0 if the response's final answer equals the reference, or one of several, mathematically (1/2 = 0.5).

    0.0 with the component `timed_out` if comparing takes longer than 5 s.

    The answer is looked for by reward.response_from; without, math-verify looks for it in plain
    numbers, LaTeX and \\boxed{}.
    """
    from math_verify import parse, verify

    config = _with_own(setup, _Places)

    def reward(prompt: str, response: str, answer: str | list[str], record: dict) -> float | dict[str, float]:
        golds = _references(answer, config)
        if config.response_from:
            found = find_answer(response, config.response_from)
            if found is None:
                return 0.0
            if normalise_number(found) in map(normalise_number, golds):
                return 1.0  # most right answers; parsing costs milliseconds
            response = f"${normalise_number(found)}$"
        # The library's own time limits use the alarm signal, which the reward worker needs. What the
        # model wrote must not end a run, so an expression that takes too long is simply not right.
        parsed = [parse(f"${normalise_number(gold)}$", parsing_timeout=None) for gold in golds]
        if not all(parsed):
            raise ValueError(f"math-verify cannot read the reference answer {golds[parsed.index([])]!r}")
        with time_limit(_COMPARE_SECONDS) as limit:
            answered = parse(response, parsing_timeout=None)
            return float(any(verify(gold, answered, timeout_seconds=None) for gold in parsed))
        return {"reward": 0.0, "timed_out": float(limit.reached)}

    # What math-verify makes of it is not asked: that takes milliseconds, and may take for ever.
    reward.check_record = lambda answer, record: _references(answer, config)
    return reward


_COMPARE_SECONDS = 5.0


def _with_own(setup: Setup, options: type) -> RewardConfig:
    """The section with the term's own options in place of its keys of the same name."""
    own = {name: value for name, value in vars(setup.options(options)).items() if value is not None and name != "letters"}
    return replace(setup.config, **own)


def _references(answer: str | list[str], config: RewardConfig) -> list[str]:
    """What reward.answer_from finds in the reference answer, or in each of several."""
    references = []
    for text in [answer] if isinstance(answer, str) else answer:
        found = find_answer(text, config.answer_from)
        if found is None:
            raise ValueError(f"no answer found by reward.answer_from={config.answer_from} in {text[-80:]!r}")
        references.append(found)
    return references
