"""Rules: conditions on the values of several configuration keys.

Most rules have one of a few forms: `needs`, `excludes`, `only_with`, `divides`, `at_most` and `refuses`. The
functions of these names make rules from settings as a user writes them, such as `rollout.strategy=beam`. Any
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
SYNC_COMMANDS = tuple(command for command in Command if command.syncs)


@dataclass(frozen=True)
class Rule:
    """A condition that the values of several configuration keys must meet together.

    An example is that train.ppo_mini_batch_size must divide data.train_batch_size. Types and limits of single
    keys are not rules, because the schema checks them. If the schema refuses the value of a key, rules that
    read this key are skipped.
    """

    says: str
    """What must hold, in one sentence that names the keys."""
    keys: tuple[str, ...]
    """All configuration keys whose values the check reads."""
    commands: tuple[str, ...]
    """Commands to which the rule applies, such as train."""
    check: Callable[..., Iterator[str]]
    """Function that yields one text for each violation: the values that break the rule, or "" if `says` names
    them."""
    whole: bool = False
    """True if `check` yields complete messages, so that `says` is not put before them."""

    def violations(self, *subject: Any) -> list[str]:
        """Return one sentence for each violation of this rule: what must hold, and the values that break it.

        subject: arguments for the rule's check function, such as the configuration.
        """
        found = list(self.check(*subject))
        if self.whole:
            return found
        says = self.says.removesuffix(".")
        return [f"{says} ({values})" if values else says for values in found]


class RuleBook:
    """A list of rules about one subject, such as rewards. Violations are reported in the order of the list.

    Each rule has a check, a function that looks for violations. The checks of all rules in a book take the
    same arguments, such as a Config.
    """

    def __init__(self, *rules: Rule) -> None:
        self.rules = list(rules)

    def rule(
        self, says: str, *keys: str, commands: tuple[str, ...] = TRAINING_COMMANDS, whole: bool = False
    ) -> Callable[[Callable], Rule]:
        """Return a decorator that turns a function into a new rule of this book.

        The function is the rule's check. It takes the arguments of the book's checks, such as a Config, and
        yields one text for each violation: the values that break the rule, or "" if `says` names them.

        says: what must hold, in one sentence that names the keys. Error messages about the rule begin with
            `says`.
        keys: all configuration keys whose values the check reads.
        commands: commands to which the rule applies, such as train.
        whole: True if the check yields complete messages, so that `says` is not put before them.
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
        command: the command that will run. Rules that do not apply to this command are skipped. None: all
            rules are checked.
        refused: keys whose values the schema refuses. Rules that read these keys are skipped.
        """
        return [
            sentence
            for rule in self.rules
            if command in (None, *rule.commands) and not refused.intersection(rule.keys)
            for sentence in rule.violations(*subject)
        ]


def needs(condition: str, other: str, because: str = "", commands: tuple[str, ...] = ("train",)) -> Rule:
    """Return the rule that `other` must hold if `condition` holds.

    condition, other: a setting such as `weight_sync.transport=disk`, or several settings joined with the
        words `and` and `or`, where `and` binds more tightly. `|` separates alternative values of a key, and
        `!=` negates. A key alone means that its value is not null, false, 0 or empty.
    because: the reason, to be put at the end of the message.
    commands: commands to which the rule applies.
    """

    def check(config: Config, *_: Any) -> Iterator[str]:
        if _holds(condition, config) and not _holds(other, config):
            yield shown(config, *_keys(other))

    says = _sentence(f"{condition} needs {other}", because)
    return Rule(says, _keys(f"{condition} or {other}"), commands, check)


def excludes(condition: str, other: str, because: str = "", commands: tuple[str, ...] = ("train",)) -> Rule:
    """Return the rule that `condition` and `other` must not both hold.

    condition, other: settings such as `rollout.n=1`, which the words `and` and `or` may join. A key alone
        means that its value is not null, false, 0 or empty.
    because: the reason, to be put at the end of the message.
    commands: commands to which the rule applies.
    """
    keys = _keys(f"{condition} or {other}")

    def check(config: Config, *_: Any) -> Iterator[str]:
        if _holds(condition, config) and _holds(other, config):
            yield shown(config, *keys)

    return Rule(_sentence(f"{condition} cannot be combined with {other}", because), keys, commands, check)


def only_with(
    keys: str | tuple[str, ...],
    condition: str,
    because: str = "",
    commands: tuple[str, ...] = ("train",),
) -> Rule:
    """Return the rule that some keys may be changed from their defaults only if `condition` holds.

    Without the condition, the keys would have no effect.

    keys: a configuration key, a section (for all keys in it), or a tuple of these.
    condition: settings such as `rollout.strategy=beam`, which the words `and` and `or` may join. A key alone
        means that its value is not null, false, 0 or empty.
    because: the reason, to be put at the end of the message.
    commands: commands to which the rule applies.
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


def divides(divisor: str, dividend: str, commands: tuple[str, ...] = ("train",)) -> Rule:
    """Return the rule that the value of the key `divisor` must divide the value of the key `dividend`."""

    def check(config: Config, *_: Any) -> Iterator[str]:
        if value_of(config, dividend) % value_of(config, divisor):
            yield shown(config, divisor, dividend)

    return Rule(f"{divisor} must divide {dividend}.", (divisor, dividend), commands, check)


def at_most(lower: str, upper: str, commands: tuple[str, ...] = ("train",)) -> Rule:
    """Return the rule that the value of the key `lower` must not exceed that of the key `upper`.

    The rule holds if one of the two values is null.
    """

    def check(config: Config, *_: Any) -> Iterator[str]:
        low, high = value_of(config, lower), value_of(config, upper)
        if None not in (low, high) and low > high:
            yield shown(config, lower, upper)

    return Rule(f"{lower} must be at most {upper}.", (lower, upper), commands, check)


def refuses(condition: str, because: str, commands: tuple[str, ...]) -> Rule:
    """Return the rule that `condition` must not hold for some commands.

    condition: settings such as `rollout.n=1`, which the words `and` and `or` may join. A key alone means that
        its value is not null, false, 0 or empty.
    because: the reason, to be put at the end of the message.
    commands: the commands, such as eval.
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
    """Return the values of some keys as text, `KEY=VALUE, KEY=VALUE, ...`, for an error message."""
    return ", ".join(f"{key}={value_text(value_of(config, key))}" for key in keys)


def _sentence(claim: str, because: str) -> str:
    return f"{claim}: {because}." if because else f"{claim}."


def _alternatives(condition: str) -> list[list[str]]:
    """Split a condition, such as `a=1 and b=2 or c=3`, into alternatives: [["a=1", "b=2"], ["c=3"]].

    The condition holds if all settings of at least one alternative hold.
    """
    return [alternative.split(" and ") for alternative in condition.split(" or ")]


def _keys(condition: str) -> tuple[str, ...]:
    """Return the configuration keys that a condition names, without repetitions."""
    settings = [setting for alternative in _alternatives(condition) for setting in alternative]
    return tuple(dict.fromkeys(re.split("!?=", setting)[0] for setting in settings))


def _holds(condition: str, config: Config) -> bool:
    return any(all(_is_so(one, config) for one in alternative) for alternative in _alternatives(condition))


def _is_so(setting: str, config: Config) -> bool:
    """Return True if the configuration fulfils one setting of a condition, such as `run.seed=1|2` (1 or 2).

    `!=` negates. A key alone means that its value is not null, false, 0 or empty.
    """
    key, separator, wanted = setting.partition("=")
    value = value_of(config, key.removesuffix("!"))
    if not separator:
        return value not in (None, False, 0, "", [], {})
    return (_text(value) in wanted.split("|")) != key.endswith("!")


def _text(value: Any) -> str:
    """Return a single value as a user writes it, such as `true`, `null` or the name of a choice."""
    if isinstance(value, Enum):
        return value.value
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
