"""What a reward is made of: one function, or terms that are added up; and the options of each."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from typing import Any, TypeVar

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from grpo_megatron.config.options import limits_of, option
from grpo_megatron.config.reward import MODEL, RewardConfig
from grpo_megatron.errors import UserError

# How the term of a reward without reward.terms is called.
WHOLE = "reward"
# Names that components have which are no terms; the last ones are those of rollout.tool_environment.
_TAKEN = (WHOLE, "overlong_penalty", "tool_calls", "failed_tool_calls")

Options = TypeVar("Options")


@dataclass(frozen=True)
class Term:
    """A function's value counts `weight` times. args: the function's own options."""

    name: str
    function: str
    weight: float
    args: Mapping[str, Any]

    @property
    def is_whole(self) -> bool:
        """Whether there are no other terms, because it is all that reward.function names."""
        return self.name == WHOLE

    @property
    def key(self) -> str:
        """Where its options are, for messages."""
        return "reward.args" if self.is_whole else f"reward.terms.{self.name}"


@dataclass
class _Entry:
    function: str = option("", "as reward.function")
    weight: float = option(1.0, "of its value in the sum")


def terms_of(config: RewardConfig) -> list[Term]:
    """In the order in which they are computed. Raises UserError for what is no term."""
    if not config.terms:
        return [Term(WHOLE, config.function, 1.0, config.args)]
    return [_term(str(name), entry) for name, entry in config.terms.items()]


def model_term(terms: Sequence[Term]) -> Term | None:
    """The one that a reward model gives its value, after generation; no worker computes it."""
    return next((term for term in terms if term.function == MODEL), None)


def _term(name: str, entry: Any) -> Term:
    key = f"reward.terms.{name}"
    if not name.isidentifier() or name in _TAKEN:
        raise UserError(
            f"{key}: a term's name is a word of letters, digits and _, and none of {', '.join(_TAKEN)}"
        )
    if not isinstance(entry, dict) or not isinstance(entry.get("function"), str):
        raise UserError(f"{key} must say its function, such as {{function: math, weight: 1.0}}")
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
    """What a built-in reward is made from. secrets: values of the environment variables that it asks for by `secrets`; none where it is
    only looked at."""

    config: RewardConfig
    term: Term
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)

    def options(self, cls: type[Options]) -> Options:
        """The term's own ones, see read_options."""
        beside = () if self.term.is_whole else ("function", "weight")
        return read_options(cls, self.term.args, self.term.key, beside)


def total(terms: Sequence[Term], components: Mapping[str, float]) -> float:
    """The reward: the sum of weight times value over all terms. components: with the value of each term by its name.

    Raises KeyError for a term that has no value yet.
    """
    return sum(term.weight * components[term.name] for term in terms)


def read_options(
    cls: type[Options], values: Mapping[str, Any], key: str, besides: tuple[str, ...] = ()
) -> Options:
    """values as a dataclass of `config.options.option`. besides: what else stands beside them, for messages.

    Raises UserError for an unknown option, naming the nearest, a wrong type, and for a value out of its limits.
    """
    known = {one.name: one for one in fields(cls)}
    for name in values:
        if name not in known:
            nearest = get_close_matches(str(name), [*known, *besides], 1, cutoff=0.6)
            hint = (
                f"; did you mean {nearest[0]!r}?"
                if nearest
                else f"; there are {', '.join([*known, *besides])}"
            )
            raise UserError(f"{key}: unknown option {str(name)[:80]!r}{hint}")
    try:
        read = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(cls), dict(values)))
    except OmegaConfBaseException as error:
        raise UserError(f"{key}: {str(error).splitlines()[0]}") from error
    for name, one in known.items():
        for problem in limits_of(one).problems(f"{key}.{name}", getattr(read, name)):
            raise UserError(problem)
    return read
