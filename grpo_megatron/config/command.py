"""The subcommands of grpo-megatron that start a run from a configuration, such as `train`."""

from enum import StrEnum


class Command(StrEnum):
    """A subcommand of grpo-megatron that starts a run. The value is its name on the command line."""

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
