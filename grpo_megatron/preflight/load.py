"""Loader of legal configurations, for the commands that run them."""

from grpo_megatron.config.command import Command
from grpo_megatron.config.load import read_config
from grpo_megatron.config.schema import Config
from grpo_megatron.errors import UserError
from grpo_megatron.preflight.rules import violations


def load_config(path: str | None, overrides: list[str], command: Command = Command.train) -> Config:
    """Return the typed configuration for a command. Its values are within their limits and break no rule.

    Raises UserError if the configuration cannot be read or typed (config.load.read_config). Raises UserError
    also with all violations of limits and rules.
    """
    config = read_config(path, overrides, command)
    broken = violations(config, command)
    if broken:
        raise UserError("the configuration is not legal:\n" + "\n".join(f"  - {rule}" for rule in broken))
    return config
