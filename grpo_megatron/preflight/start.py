"""Checks that a command makes, after those of its configuration, before it starts any process."""

from grpo_megatron.config.command import Command
from grpo_megatron.config.schema import Config
from grpo_megatron.monitoring.optional import check_listeners
from grpo_megatron.preflight.cluster import check_cluster
from grpo_megatron.preflight.model import check_model
from grpo_megatron.preflight.output_folders import check_output_folders


def check_start(config: Config, command: Command) -> None:
    """Check packages, model, output folders and machines before a run starts.

    Raises UserError for the first of these that does not suit the configuration.
    """
    check_listeners(config)
    check_model(config, command)
    check_output_folders(config, command)
    check_cluster(config, command)
