"""Rules: conditions on the values of several configuration keys.

Each rule has a sentence, which `config explain` shows, and a function that finds violations.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from grpo_megatron.config.command import Command

COMMANDS = tuple(Command)
# Commands that have a trainer, and commands that have engines.
TRAINING_COMMANDS = tuple(command for command in Command if command.trains)
ENGINE_COMMANDS = tuple(command for command in Command if command.generates)


@dataclass(frozen=True)
class Rule:
    """A condition on the values of several keys.

    It is skipped if one of these values is outside the limits of its own key, which is reported separately.
    """

    name: str
    """Name of the function that checks it."""
    keys: tuple[str, ...]
    """Every key whose value the check reads."""
    says: str
    """What must hold, in one sentence."""
    commands: tuple[str, ...]
    """Commands that it applies to, from COMMANDS."""
    check: Callable[..., Iterator[str]]
    """Yields a sentence for each violation, naming keys and values."""


class RuleBook:
    """The rules about one subject, such as rewards, in the order in which violations are reported.

    The decorator `@book.rule(...)` turns a function into a rule of the book. All functions of a book take the
    same arguments.
    """

    def __init__(self) -> None:
        self.rules: list[Rule] = []

    def rule(
        self, says: str, *keys: str, commands: tuple[str, ...] = TRAINING_COMMANDS
    ) -> Callable[[Callable], Callable]:
        """Return a decorator that adds a function to the book as the check of a rule.

        The function yields one sentence for each violation.

        says: what must hold, in one sentence.
        keys: every key whose value the function reads.
        commands: the commands that the rule applies to.
        """

        def add(check: Callable[..., Iterator[str]]) -> Callable[..., Iterator[str]]:
            self.rules.append(Rule(check.__name__, keys, says, commands, check))
            return check

        return add

    def violations(
        self, *subject, command: Command | None = None, out_of_limits: frozenset[str] = frozenset()
    ) -> list[str]:
        """Return one sentence for each violation.

        subject: arguments for the check functions, such as the configuration.
        command: the command to be run. Rules that do not apply to it are skipped; None: all rules are
            checked.
        out_of_limits: keys whose values are outside the limits of their own key. Rules about them are
            skipped.
        """
        return [
            sentence
            for rule in self.rules
            if command in (None, *rule.commands) and not out_of_limits.intersection(rule.keys)
            for sentence in rule.check(*subject)
        ]
