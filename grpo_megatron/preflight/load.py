"""Loader of configurations for commands: read, typed and legal."""

from grpo_megatron.config.load import read_config
from grpo_megatron.config.schema import Config
from grpo_megatron.errors import UserError
from grpo_megatron.preflight.rules import violations


def load_config(path: str | None, overrides: list[str], command: str = "train") -> Config:
    """Return the result of config.load.read_config if it breaks no rule.

    Raises UserError like `read_config`, or with all broken rules.
    """
    config = read_config(path, overrides, command)
    broken = violations(config, command)
    if broken:
        raise UserError("the configuration is not legal:\n" + "\n".join(f"  - {rule}" for rule in broken))
    return config
