"""Check, before any process starts, that a run can write to the folders that its configuration names."""

from pathlib import Path

from grpo_megatron.config.schema import Config
from grpo_megatron.errors import UserError
from grpo_megatron.paths import nearest_folder, output_folder_problem
from grpo_megatron.preflight.rule import TRAINING_COMMANDS


def output_folders(config: Config, command: str) -> dict[str, str]:
    """Return {key: folder} of the folders that a run of this command writes to.

    The run's own folder is below `run.root`.
    """
    found = {"run.root": config.run.root}
    if command in TRAINING_COMMANDS and config.megatron.offload_folder:
        found["megatron.offload_folder"] = config.megatron.offload_folder
    if command == "train" and not config.rollout.replay and config.weight_sync.folder:
        found["weight_sync.folder"] = config.weight_sync.folder
    return found


def must_be_writable(key: str, folder: str) -> None:
    """Raise UserError for a folder that this machine cannot write to."""
    if problem := output_folder_problem(folder):
        raise UserError(f"{key}={folder} {problem}; it must be a folder that the run can make and write to")


def is_of_another_machine(folder: str) -> bool:
    """Return True if no part of an absolute path exists here.

    The path may then exist on another node, such as a local disk.
    """
    return nearest_folder(folder) == Path("/") and Path(folder).absolute() != Path("/")


def check_output_folders(config: Config, command: str) -> None:
    """Raise UserError, naming the key, for a folder that this machine has to write to and cannot.

    Ranks on other machines check megatron.offload_folder themselves. The run's own folder is created before
    anything else, and is not checked here.
    """
    for key, folder in output_folders(config, command).items():
        elsewhere = key == "megatron.offload_folder" and config.cluster.ray_address is not None
        if key != "run.root" and not elsewhere:
            must_be_writable(key, folder)
