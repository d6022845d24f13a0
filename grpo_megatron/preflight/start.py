"""What a command asks before it starts any process, beside the rules of its configuration."""

from grpo_megatron.config.schema import Config
from grpo_megatron.preflight.cluster import check_cluster
from grpo_megatron.preflight.model import check_model


def check_start(config: Config, command: str) -> None:
    """Raises UserError for a model or machines that do not fit what is configured. command: train or sft."""
    check_model(config, command)
    check_cluster(config, command)
