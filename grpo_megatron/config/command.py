"""The commands that make a run from a configuration."""

from enum import StrEnum


class Command(StrEnum):
    """A subcommand of grpo-megatron that makes a run. The value is its name on the command line."""

    train = "train"
    sft = "sft"
    reward_model = "reward-model"
    eval = "eval"

    @property
    def trains(self) -> bool:
        """Return True if the command starts trainer ranks."""
        return self != Command.eval

    @property
    def generates(self) -> bool:
        """Return True if the command starts engines. `train` starts none if it replays recorded rollouts."""
        return self in (Command.train, Command.eval)
