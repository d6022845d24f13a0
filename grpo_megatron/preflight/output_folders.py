"""Check, before any process starts, that a run can write to the folders that its configuration names."""

from pathlib import Path

from grpo_megatron.config.command import Command
from grpo_megatron.config.schema import Config
from grpo_megatron.errors import UserError
from grpo_megatron.paths import nearest_folder, output_folder_problem


def output_folders(config: Config, command: Command) -> dict[str, str]:
    """Return {configuration key: folder} of the folders that a run of this command writes to.

    The folder of `run.root` contains the run's own folder.
    """
    found = {"run.root": config.run.root}
    if command.trains and config.megatron.offload_folder:
        found["megatron.offload_folder"] = config.megatron.offload_folder
    if command == Command.train and not config.rollout.replay and config.weight_sync.folder:
        found["weight_sync.folder"] = config.weight_sync.folder
    return found


def must_be_writable(key: str, folder: str) -> None:
    """Raise UserError, which names the key, if this machine cannot make the folder or write to it."""
    if problem := output_folder_problem(folder):
        raise UserError(f"{key}={folder} {problem}; it must be a folder that the run can create and write to")


def is_of_another_machine(folder: str) -> bool:
    """Return True if not even the first folder of the path exists on this machine.

    The path may then belong to another node, for example as the mount point of a local disk.
    """
    return nearest_folder(folder) == Path("/") and Path(folder).absolute() != Path("/")


def check_output_folders(config: Config, command: Command) -> None:
    """Check that this machine can write to the run's folders, except for the run's own folder.

    Raises UserError, which names the key. In a Ray cluster, the ranks check megatron.offload_folder on their
    own machines. The run's own folder is created before this check.
    """
    for key, folder in output_folders(config, command).items():
        elsewhere = key == "megatron.offload_folder" and config.cluster.ray_address is not None
        if key != "run.root" and not elsewhere:
            must_be_writable(key, folder)
