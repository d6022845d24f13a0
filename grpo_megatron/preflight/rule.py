"""Rules: conditions on the values of several configuration keys.

Most rules have one of a few shapes: `needs`, `excludes`, `only_with`, `divides`, `at_most` and `refuses`. The
function of that name makes the rule from settings as a user writes them, such as `rollout.strategy=beam`. Any
other rule is a function with the decorator `RuleBook.rule`.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from functools import reduce
from typing import Any

from grpo_megatron.config.command import Command
from grpo_megatron.config.keys import default_of, is_section, known_keys, value_text
from grpo_megatron.config.schema import Config

COMMANDS = tuple(Command)
# Commands that have a trainer, and commands that have engines.
TRAINING_COMMANDS = tuple(command for command in Command if command.trains)
ENGINE_COMMANDS = tuple(command for command in Command if command.generates)


@dataclass(frozen=True)
class Rule:
    """A condition on the values of several configuration keys.

    A rule is skipped if the schema refuses the value of one of its keys, because that error is reported
    separately.
    """

    says: str
    """What must hold, in one sentence that names the keys."""
    keys: tuple[str, ...]
    """All keys whose values the check reads."""
    commands: tuple[str, ...]
    """Commands to which the rule applies, from COMMANDS."""
    check: Callable[..., Iterator[str]]
    """Yields a text for each violation: the values that break the rule, or "" if `says` names them."""
    whole: bool = False
    """True if `check` yields whole messages, to which `says` is not added, such as those of a registry."""

    def violations(self, *subject: Any) -> list[str]:
        """Return one sentence for each violation of this rule: what must hold, and the values that break it.

        subject: arguments of `check`, such as the configuration.
        """
        found = list(self.check(*subject))
        if self.whole:
            return found
        says = self.says.removesuffix(".")
        return [f"{says} ({values})" if values else says for values in found]


class RuleBook:
    """The rules about one subject, such as rewards, in the order in which violations are reported.

    The checks of all rules in a book take the same arguments.
    """

    def __init__(self, *rules: Rule) -> None:
        self.rules = list(rules)

    def rule(
        self, says: str, *keys: str, commands: tuple[str, ...] = TRAINING_COMMANDS, whole: bool = False
    ) -> Callable[[Callable], Rule]:
        """Return a decorator that adds a rule to the book. The decorated function is the rule's `check`.

        The arguments are the fields of Rule.
        """

        def add(check: Callable[..., Iterator[str]]) -> Rule:
            self.rules.append(Rule(says, keys, commands, check, whole))
            return self.rules[-1]

        return add

    def violations(
        self, *subject: Any, command: Command | None = None, refused: frozenset[str] = frozenset()
    ) -> list[str]:
        """Return one sentence for each violation of the book's rules.

        subject: arguments for the checks, such as the configuration.
        command: the command that will run. Rules that do not apply to this command are skipped; None: all
            rules are checked.
        refused: keys whose values the schema refuses. Rules about them are skipped.
        """
        return [
            sentence
            for rule in self.rules
            if command in (None, *rule.commands) and not refused.intersection(rule.keys)
            for sentence in rule.violations(*subject)
        ]


def needs(
    condition: str, other: str, because: str = "", commands: tuple[str, ...] = TRAINING_COMMANDS
) -> Rule:
    """Return the rule that a second condition must hold wherever a first condition holds.

    condition, other: the first and the second condition: settings such as `weight_sync.transport=disk`,
        joined by ` and ` or ` or `. `|` separates values of one key, `!=` negates. A key without a value
        means that the key's value is not null, false, 0 or empty.
    because: the reason, as the end of the sentence.
    """

    def check(config: Config, *_: Any) -> Iterator[str]:
        if _holds(condition, config) and not _holds(other, config):
            yield shown(config, *_keys(other))

    says = _sentence(f"{condition} needs {other}", because)
    return Rule(says, _keys(f"{condition} or {other}"), commands, check)


def excludes(
    condition: str, other: str, because: str = "", commands: tuple[str, ...] = TRAINING_COMMANDS
) -> Rule:
    """Return the rule that two conditions cannot both hold. The arguments are as for `needs`."""
    keys = _keys(f"{condition} or {other}")

    def check(config: Config, *_: Any) -> Iterator[str]:
        if _holds(condition, config) and _holds(other, config):
            yield shown(config, *keys)

    return Rule(_sentence(f"{condition} cannot be combined with {other}", because), keys, commands, check)


def only_with(
    keys: str | tuple[str, ...],
    condition: str,
    because: str = "",
    commands: tuple[str, ...] = TRAINING_COMMANDS,
) -> Rule:
    """Return the rule that keys must keep their defaults unless a condition holds.

    Otherwise the keys would have no effect.

    keys: a key, a section, or several of these.
    condition, because: as for `needs`.
    """
    named = (keys,) if isinstance(keys, str) else keys
    known = known_keys()
    leaves = [
        key
        for name in named
        for key in known
        if (key == name or key.startswith(f"{name}.")) and not is_section(known[key])
    ]

    def check(config: Config, *_: Any) -> Iterator[str]:
        changed = [key for key in leaves if value_of(config, key) != default_of(known[key])]
        if changed and not _holds(condition, config):
            yield shown(config, *changed)

    have = "has" if len(named) == 1 else "have"
    says = _sentence(f"{' and '.join(named)} {have} an effect only with {condition}", because)
    return Rule(says, (*leaves, *_keys(condition)), commands, check)


def divides(divisor: str, dividend: str, commands: tuple[str, ...] = TRAINING_COMMANDS) -> Rule:
    """Return the rule that the value of the key `divisor` must divide the value of the key `dividend`."""

    def check(config: Config, *_: Any) -> Iterator[str]:
        if value_of(config, dividend) % value_of(config, divisor):
            yield shown(config, divisor, dividend)

    return Rule(f"{divisor} must divide {dividend}.", (divisor, dividend), commands, check)


def at_most(lower: str, upper: str, commands: tuple[str, ...] = TRAINING_COMMANDS) -> Rule:
    """Return the rule that the value of the key `lower` must not exceed that of the key `upper`.

    The rule holds if one of the two values is null.
    """

    def check(config: Config, *_: Any) -> Iterator[str]:
        low, high = value_of(config, lower), value_of(config, upper)
        if None not in (low, high) and low > high:
            yield shown(config, lower, upper)

    return Rule(f"{lower} must be at most {upper}.", (lower, upper), commands, check)


def refuses(condition: str, because: str, commands: tuple[str, ...]) -> Rule:
    """Return the rule that a condition must not hold with some commands.

    condition, because: as for `needs`.
    """
    keys = _keys(condition)

    def check(config: Config, *_: Any) -> Iterator[str]:
        if _holds(condition, config):
            yield shown(config, *keys)

    says = _sentence(f"{condition} cannot be used with the command {' or '.join(commands)}", because)
    return Rule(says, keys, commands, check)


def value_of(config: Config, key: str) -> Any:
    return reduce(getattr, key.split("."), config)


def shown(config: Config, *keys: str) -> str:
    """Return `KEY=VALUE, KEY=VALUE, ...` for the message of a violation."""
    return ", ".join(f"{key}={value_text(value_of(config, key))}" for key in keys)


def _sentence(claim: str, because: str) -> str:
    return f"{claim}: {because}." if because else f"{claim}."


def _alternatives(condition: str) -> list[list[str]]:
    """Return a condition as a list of alternatives. Each alternative is a list of settings that all hold."""
    return [alternative.split(" and ") for alternative in condition.split(" or ")]


def _keys(condition: str) -> tuple[str, ...]:
    """Return the keys that a condition names, without repetitions."""
    settings = [setting for alternative in _alternatives(condition) for setting in alternative]
    return tuple(dict.fromkeys(re.split("!?=", setting)[0] for setting in settings))


def _holds(condition: str, config: Config) -> bool:
    return any(all(_is_so(one, config) for one in alternative) for alternative in _alternatives(condition))


def _is_so(setting: str, config: Config) -> bool:
    """Return True if a setting in a condition, such as `run.seed=1|2`, holds for the configuration."""
    key, separator, wanted = setting.partition("=")
    value = value_of(config, key.removesuffix("!"))
    if not separator:
        return value not in (None, False, 0, "", [], {})
    return (_text(value) in wanted.split("|")) != key.endswith("!")


def _text(value: Any) -> str:
    """Return a single value as a user writes it, such as `true`, `null` or the name of a choice."""
    if isinstance(value, Enum):
        return value.name
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
