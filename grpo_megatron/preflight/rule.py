"""Rules: conditions between keys.

A rule has data that `config explain` shows, and a check that finds violations.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

COMMANDS = ("train", "sft", "reward-model", "eval")
# Commands that have a trainer, and commands that have engines.
TRAINING_COMMANDS, ENGINE_COMMANDS = ("train", "sft", "reward-model"), ("train", "eval")


@dataclass(frozen=True)
class Rule:
    """A condition between keys. It is checked only if each of its keys is within its own limits."""

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
    """The rules of one subject, in the order in which violations are reported.

    All checks of a book take the same arguments. The decorator `@book.rule(...)` adds a check to the book.
    """

    def __init__(self) -> None:
        self.rules: list[Rule] = []

    def rule(
        self, says: str, *keys: str, commands: tuple[str, ...] = TRAINING_COMMANDS
    ) -> Callable[[Callable], Callable]:
        def add(check: Callable[..., Iterator[str]]) -> Callable[..., Iterator[str]]:
            self.rules.append(Rule(check.__name__, keys, says, commands, check))
            return check

        return add

    def violations(
        self, *subject, command: str | None = None, out_of_limits: frozenset[str] = frozenset()
    ) -> list[str]:
        """Return one sentence for each violation.

        subject: arguments of the checks.
        command: skip rules that do not apply to this command; None: check all rules.
        out_of_limits: keys with values out of their own limits. Rules about them are skipped.
        """
        return [
            sentence
            for rule in self.rules
            if command in (None, *rule.commands) and not out_of_limits.intersection(rule.keys)
            for sentence in rule.check(*subject)
        ]
