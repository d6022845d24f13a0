"""The terms of a reward, which is one function or a weighted sum of several, and the options of each term."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from grpo_megatron.config import options
from grpo_megatron.config.keys import value_problem
from grpo_megatron.config.options import option
from grpo_megatron.config.reward import MODEL, RewardConfig
from grpo_megatron.errors import UserError

# Name of the only term if reward.terms is not used.
WHOLE = "reward"
# Component names that no term may have. The last two belong to rollout.tool_environment.
_TAKEN = (WHOLE, "overlong_penalty", "tool_calls", "failed_tool_calls")

Options = TypeVar("Options")


@dataclass(frozen=True)
class Term:
    """A term (summand) of the reward: `weight` times the value of a reward function."""

    name: str
    """Key of the term in reward.terms, or WHOLE if reward.function is the whole reward."""
    function: str
    """Name of the reward function."""
    weight: float
    """Factor of the function's value in the reward."""
    args: Mapping[str, Any]
    """{option of the reward function: value}, as the user configured them."""

    @property
    def is_whole(self) -> bool:
        """True if this term is the whole reward, because reward.function is set instead of reward.terms."""
        return self.name == WHOLE

    @property
    def key(self) -> str:
        """Configuration key of the term's options, for messages, such as `reward.terms.right`."""
        return "reward.args" if self.is_whole else f"reward.terms.{self.name}"


@options.dataclass
class _Entry:
    function: str = option("", "reward function, named as in reward.function")
    weight: float = option(1.0, "factor of the value in the sum")


def terms_of(config: RewardConfig) -> list[Term]:
    """Return the terms of the configured reward, in the order of reward.terms.

    If reward.terms is not set, reward.function is the only term.

    Raises UserError for an invalid term.
    """
    if not config.terms:
        return [Term(WHOLE, config.function, 1.0, config.args)]
    return [_term(str(name), entry) for name, entry in config.terms.items()]


def model_term(terms: Sequence[Term]) -> Term | None:
    """Return the term whose value is the score of a reward model, or None if there is no such term.

    Reward workers do not compute this term. The reward model computes all scores after generation.
    """
    return next((term for term in terms if term.function == MODEL), None)


def _term(name: str, entry: Any) -> Term:
    key = f"reward.terms.{name}"
    if not name.isidentifier() or name in _TAKEN:
        raise UserError(
            f"{key}: the name of a term must consist of letters, digits and _, and must not be one of "
            f"{', '.join(_TAKEN)}"
        )
    if not isinstance(entry, dict) or not isinstance(entry.get("function"), str):
        raise UserError(f"{key} must specify a function, such as {{function: math, weight: 1.0}}")
    own = {option: entry[option] for option in ("function", "weight") if option in entry}
    read = read_options(_Entry, own, key)
    return Term(
        name,
        read.function,
        read.weight,
        {option: value for option, value in entry.items() if option not in own},
    )


@dataclass(frozen=True)
class Setup:
    """Configuration, term and secrets from which a built-in reward function is made.

    The term is the summand of the configured reward that the function computes.
    """

    config: RewardConfig
    term: Term
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)
    """{environment variable that the reward reads: its value}. May be empty if the reward is never called."""

    def options(self, cls: type[Options]) -> Options:
        """Return the term's own options as an instance of a dataclass.

        cls: a dataclass made with config.options.dataclass, with one field per option.

        Raises UserError for an invalid option.
        """
        beside = () if self.term.is_whole else ("function", "weight")
        return read_options(cls, self.term.args, self.term.key, beside)


def total(terms: Sequence[Term], components: Mapping[str, float]) -> float:
    """Return the total reward of a response: the sum of weight times value over all terms.

    components: {name of a term: value of its function}. Other numbers in it are ignored.

    Raises KeyError if a term has no value yet.
    """
    return sum(term.weight * components[term.name] for term in terms)


def read_options(
    cls: type[Options], values: Mapping[str, Any], key: str, besides: tuple[str, ...] = ()
) -> Options:
    """Check the options of a reward function, and return them as an instance of `cls`.

    cls: a dataclass made with config.options.dataclass, with one field per option.
    values: {option: value} as the user configured them.
    key: configuration key of the options, for error messages.
    besides: other names that the user may set under this key, which are read elsewhere. Error messages
        suggest them too.

    Raises UserError for an unknown option, for a value of a wrong type, and for a value outside its limits.
    """
    known = cls.__pydantic_fields__
    for name in values:
        if name not in known:
            nearest = get_close_matches(str(name), [*known, *besides], 1, cutoff=0.6)
            hint = (
                f"; did you mean {nearest[0]!r}?"
                if nearest
                else f"; the options are {', '.join([*known, *besides])}"
            )
            raise UserError(f"{key}: unknown option {str(name)[:80]!r}{hint}")
    try:
        return TypeAdapter(cls).validate_python(dict(values))
    except ValidationError as error:
        first = error.errors()[0]
        name = first["loc"][0]
        raise UserError(value_problem(f"{key}.{name}", known[name], first)) from error
