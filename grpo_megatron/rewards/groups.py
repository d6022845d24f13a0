"""Group rewards: comparisons of the responses to one prompt with each other."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from grpo_megatron.config.options import FilledText, dataclass, option
from grpo_megatron.errors import UserError
from grpo_megatron.rewards.terms import Setup

TOKENS = "tokens"


@dataclass
class _Rank:
    by: FilledText = option(TOKENS, "the term whose values are ranked, or tokens for the length")
    largest_first: bool = option(False, "the largest value is the best one")
    among: FilledText | None = option(
        None, "a term; only responses with a value of at least among_from are ranked, the others score 0"
    )
    among_from: float = option(1.0, "minimum value of the term `among` for a response to be ranked")


def rank(setup: Setup) -> Callable[..., list[float]]:
    """Make the group reward `rank`: for each response, the share of the prompt's other responses it beats.

    By default, a longer response is worse. The option `by` names another value to compare. Another response
    that is equally good counts half. With the option `among`, only some responses take part: each is compared
    only with the others that take part, and the rest get 0. If a single response takes part, it gets 1.
    """
    options = setup.options(_Rank)

    def reward(
        prompt: str,
        responses: Sequence[str],
        answer: str | list[str],
        record: dict,
        tokens: Sequence[int],
        components: Sequence[Mapping[str, float]],
    ) -> list[float]:
        values = np.array(
            tokens if options.by == TOKENS else [found[options.by] for found in components], dtype=np.float64
        )
        if not options.largest_first:
            values = -values
        ranked = np.ones(len(values), bool)
        if options.among is not None:
            ranked = np.array([found[options.among] >= options.among_from for found in components])
        chosen = values[ranked]
        better = (chosen[:, None] > chosen).sum(1) + ((chosen[:, None] == chosen).sum(1) - 1) / 2
        scores = np.zeros(len(values))
        scores[ranked] = better / (len(chosen) - 1) if len(chosen) > 1 else 1.0
        return scores.tolist()

    reward.needs = tuple(name for name in (options.by, options.among) if name not in (None, TOKENS))
    return reward


@dataclass
class _GroupLength:
    right: FilledText | None = option(None, "the term that says whether a response is right")
    right_from: float = option(1.0, "a response is right if that term's value is at least this")


def group_length(setup: Setup) -> Callable[..., list[float]]:
    """Make the group reward `group_length`, which prefers short responses.

    It follows Kimi k1.5 (arXiv:2501.12599 section 2.3.3). The reward falls linearly with the length, from 0.5
    for the shortest response to a prompt to -0.5 for the longest response. A wrong response gets at most 0.
    The option `right` names the term that says whether a response is right. If all lengths are equal, all
    responses get 0.

    Raises UserError if the option `right` is not set.
    """
    options = setup.options(_GroupLength)
    if options.right is None:
        raise UserError(f"{setup.term.key}: group_length requires the option right (name of a term)")

    def reward(
        prompt: str,
        responses: Sequence[str],
        answer: str | list[str],
        record: dict,
        tokens: Sequence[int],
        components: Sequence[Mapping[str, float]],
    ) -> list[float]:
        lengths = np.array(tokens, dtype=np.float64)
        spread = np.ptp(lengths)
        if not spread:
            return [0.0] * len(lengths)
        values = 0.5 - (lengths - lengths.min()) / spread
        right = np.array([found[options.right] >= options.right_from for found in components])
        return np.where(right, values, np.minimum(values, 0.0)).tolist()

    reward.needs = (options.right,)
    return reward
