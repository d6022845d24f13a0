"""Check, before any process starts, that a run can write to the folders that its configuration names."""

from pathlib import Path

from grpo_megatron.config.command import Command
from grpo_megatron.config.schema import Config
from grpo_megatron.errors import UserError
from grpo_megatron.paths import nearest_folder, output_folder_problem


def output_folders(config: Config, command: Command) -> dict[str, str]:
    """Return {configuration key: folder} of the folders that a run of a command writes to.

    run.root is included, because the run's own folder is created in it. The recording of samples
    (rollout.record) is not included.
    """
    found = {"run.root": config.run.root}
    if command.trains and config.megatron.offload_folder:
        found["megatron.offload_folder"] = config.megatron.offload_folder
    if command.syncs and not config.rollout.replay and config.weight_sync.folder:
        found["weight_sync.folder"] = config.weight_sync.folder
    return found


def must_be_writable(key: str, folder: str) -> None:
    """Check that files can be written to a folder, which need not exist yet. Raise UserError otherwise.

    The folder is not created. The check creates a temporary folder and deletes it.

    key: configuration key of the folder, which the error names.
    """
    if problem := output_folder_problem(folder):
        raise UserError(f"{key}={folder} {problem}; it must be a folder that the run can create and write to")


def is_of_another_machine(folder: str) -> bool:
    """Return True if a path seems to be on another machine, because not even its first folder exists here.

    An example is /fast_disk/run, if /fast_disk is a disk that is mounted only on the compute nodes.
    """
    return nearest_folder(folder) == Path("/") and Path(folder).absolute() != Path("/")


def check_output_folders(config: Config, command: Command) -> None:
    """Check that this machine can write to the folders that the configuration names.

    The folder in run.root is not checked, because the run's own folder has been created in it already. With a
    Ray cluster, megatron.offload_folder is not checked either, because each rank checks it on its own
    machine.

    Raises UserError, which names the configuration key, if a folder cannot be written to.
    """
    for key, folder in output_folders(config, command).items():
        elsewhere = key == "megatron.offload_folder" and config.cluster.ray_address is not None
        if key != "run.root" and not elsewhere:
            must_be_writable(key, folder)
