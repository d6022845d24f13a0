"""A rule: what must hold between keys, as data that `config explain` can show and a check that can be asked."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

COMMANDS = ("train", "sft", "reward-model", "eval")
# Those that have a trainer, and those that have engines.
TRAINING_COMMANDS, ENGINE_COMMANDS = ("train", "sft", "reward-model"), ("train", "eval")


@dataclass(frozen=True)
class Rule:
    """name: of the function that checks it. keys: every key whose value the check reads. says: what must hold, one sentence.

    commands: those of COMMANDS that it is for. check: yields a sentence for each violation, naming the keys and
    values; it is asked only where each of its keys is within its own limits.
    """

    name: str
    keys: tuple[str, ...]
    says: str
    commands: tuple[str, ...]
    check: Callable[..., Iterator[str]]


class RuleBook:
    """The rules of one subject, in the order in which their violations are reported.

    All checks of a book take the same arguments. `@book.rule(...)` adds a function and returns it unchanged.
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
        """One sentence for each violation, without the rules on keys that are out of their limits.

        command: without the rules that are not for it; None: all.
        """
        return [
            sentence
            for rule in self.rules
            if command in (None, *rule.commands) and not out_of_limits.intersection(rule.keys)
            for sentence in rule.check(*subject)
        ]
