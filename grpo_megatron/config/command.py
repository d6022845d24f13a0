"""The kinds of runs that start from a configuration. Most are subcommands of grpo-megatron, like `train`."""

from enum import StrEnum


class Command(StrEnum):
    """A kind of run. The value is the name of its subcommand of grpo-megatron.

    `serve` is also the kind of a run that a user's own loop controls (grpo_megatron.api).
    """

    train = "train"
    sft = "sft"
    reward_model = "reward-model"
    eval = "eval"
    serve = "serve"

    @property
    def trains(self) -> bool:
        """Return True if the command starts trainer ranks."""
        return self != Command.eval

    @property
    def generates(self) -> bool:
        """Return True if the command starts engines. `train` starts none if it replays recorded rollouts."""
        return self in (Command.train, Command.eval, Command.serve)

    @property
    def syncs(self) -> bool:
        """Return True if the command trains a policy from which engines generate.

        The trainer ranks then keep a reference model, if the algorithm needs one.
        """
        return self.trains and self.generates
