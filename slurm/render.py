"""Rendering of a Slurm job's script: #SBATCH options, variables, arguments, then the body of train.sbatch."""

import shlex
from dataclasses import dataclass, field
from pathlib import Path

from grpo_megatron.errors import UserError

TEMPLATE = Path(__file__).with_name("train.sbatch")
# Placeholder in arguments and paths for the task's number in a job array. train.sbatch replaces it.
TASK = "{task}"


@dataclass(frozen=True)
class Job:
    """Everything that the script of a job is rendered from. Paths are absolute.

    `{task}` (TASK) in a path or argument stands for the number of a task of a job array.
    """

    name: str
    """Name of the job in Slurm's queue."""
    nodes: int
    """Number of nodes."""
    folder: str
    """Folder of the run. It may contain `{task}`."""
    working_folder: str
    """Folder that the job works in."""
    bin: str
    """Folder with the programs of the Python environment."""
    arguments: list[str]
    """Arguments of grpo-megatron after its command. They may contain `{task}`."""
    command: str = "train"
    """Command of grpo-megatron."""
    gpus_per_node: int | None = None
    """GPUs of each node. None: the job asks for no GPUs."""
    cpus_per_node: int | None = None
    """CPUs of each node. None: the job takes whole nodes."""
    partition: str | None = None
    """Option --partition of sbatch."""
    account: str | None = None
    """Option --account of sbatch."""
    qos: str | None = None
    """Option --qos of sbatch."""
    time: str | None = None
    """Time limit as sbatch takes it, such as "24:00:00"."""
    array: str | None = None
    """Tasks of a job array as sbatch takes them, such as "0-7". None: no array."""
    stop_before: int | None = None
    """Seconds before the time limit at which Slurm tells the run to save and stop. None: never."""
    grows: bool = False
    """True if other jobs may add nodes to the run. The job then writes the file `join`, which they need, into
    the folder of its output."""
    requeue: bool = False
    """True to queue the job again if it was stopped before the run was done."""
    sbatch_arguments: list[str] = field(default_factory=list)
    """Further options of sbatch, such as "--exclude=n7"."""
    launcher: list[str] = field(default_factory=list)
    """Words in front of every program that start it in a container, such as `apptainer exec IMAGE`."""
    step_options: list[str] = field(default_factory=list)
    """Options of srun for every program, such as `--container-image=IMAGE`."""
    variables: dict[str, str] = field(default_factory=dict)
    """Environment variables of the job."""
    setup: list[str] = field(default_factory=list)
    """Shell commands that the job runs first."""

    @property
    def logs(self) -> str:
        """Return the folder that Slurm writes the job's output to."""
        return f"{self.folder}/slurm"


def apptainer(image: str, mounts: list[str], gpus: bool) -> list[str]:
    """Return the words to put in front of a command so that it runs in an Apptainer container of this image.

    mounts: folders as FROM, FROM:TO or FROM:TO:OPTIONS.
    gpus: True to give the container access to the node's GPUs.
    """
    return [
        "apptainer",
        "exec",
        *(["--nv"] if gpus else []),
        *(part for mount in mounts for part in ("--bind", mount)),
        image,
    ]


def pyxis(image: str, mounts: list[str], working_folder: str) -> list[str]:
    """Return the options of srun that start a program in a container of this image, by Pyxis and Enroot.

    mounts: folders as FROM, FROM:TO or FROM:TO:OPTIONS.
    """
    both = [mount if ":" in mount else f"{mount}:{mount}" for mount in mounts]
    # Enroot gives each container a /tmp of its own. The programs of a node run in several containers and
    # share Ray's folder in /tmp, so the node's /tmp is mounted.
    if not any(mount.split(":")[1] == "/tmp" for mount in both):
        both.append("/tmp:/tmp")
    return [
        f"--container-image={image}",
        f"--container-mounts={','.join(both)}",
        f"--container-workdir={working_folder}",
    ]


def render(job: Job) -> str:
    """Return the text of the job's script.

    Raises UserError if an option has unprintable characters. Raises UserError also if the path of the run's
    folder has a backslash.
    """
    settings = {
        "GRPO_BIN": job.bin,
        "GRPO_COMMAND": job.command,
        "GRPO_RUN": shlex.join(job.launcher),
        "GRPO_SRUN": shlex.join(job.step_options),
        "GRPO_LOGS": _pattern(job.logs),
        "GRPO_REQUEUE": "1" if job.requeue else "",
        "GRPO_JOIN": f"{job.logs}/join" if job.grows else "",
        "GRPO_JOINS": "",
        **job.variables,
    }
    body = [
        line
        for line in TEMPLATE.read_text(encoding="utf-8").splitlines()
        if not line.startswith(("#!", "#SBATCH"))
    ]
    lines = [
        "#!/usr/bin/env bash",
        *(f"#SBATCH {directive(argument)}" for argument in sbatch_arguments(job)),
        "# Made by slurm/submit.py. Slurm does not make the folder of its output, which must be there.",
        "",
        *map(_setup, job.setup),
        # Empty variables too, so that the values of the submitter's shell do not reach the job.
        *(f"export {name}={shlex.quote(value)}" for name, value in settings.items()),
        shlex.join(["set", "--", *job.arguments]),
        "",
        *body,
    ]
    return "\n".join(lines) + "\n"


def _setup(command: str) -> str:
    """Return a line of the script that runs a --setup command, and ends the job with status 2 if it fails.

    The command runs in the script's own shell, so that the variables that it exports reach the run.
    """
    failed = shlex.quote(f"error: --setup {command} failed with status")
    return f'eval {shlex.quote(command)} || {{ echo {failed} "$?" >&2; exit 2; }}'


def sbatch_arguments(job: Job) -> list[str]:
    """Return the options of sbatch for a job as unquoted arguments, such as `--nodes=2`.

    Raises UserError if the path of the run's folder has a backslash, because Slurm then writes no logs.
    """
    named = {
        "job-name": job.name,
        "nodes": job.nodes,
        "ntasks-per-node": 1,
        "gpus-per-node": job.gpus_per_node,
        "cpus-per-task": job.cpus_per_node,
        "partition": job.partition,
        "account": job.account,
        "qos": job.qos,
        "time": job.time,
        "array": job.array,
        "chdir": job.working_folder,
        "output": _pattern(job.logs).replace(TASK, "%a") + ("/%A_%a.log" if job.array else "/%j.log"),
        # A job that is queued again continues its log.
        "open-mode": "append",
        "signal": job.stop_before and f"B:USR1@{job.stop_before}",
    }
    whole = [] if job.cpus_per_node else ["--exclusive", "--mem=0"]
    return [
        *(f"--{name}={value}" for name, value in named.items() if value is not None),
        *whole,
        "--requeue" if job.requeue else "--no-requeue",
        *job.sbatch_arguments,
    ]


def directive(argument: str) -> str:
    """Quote an option of sbatch, such as --name=value, for a #SBATCH line of the script.

    sbatch has its own rules for quotes and backslashes in such lines. Raises UserError if the option has
    unprintable characters.
    """
    if not argument.isprintable():
        raise UserError(f"{argument!r} contains characters that cannot be passed to sbatch; remove them")
    name, equals, value = argument.partition("=")
    if all(character.isalnum() or character in "-_./:,@%+=" for character in value):
        return argument
    quoted = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'{name}{equals}"{quoted}"'


def _pattern(path: str) -> str:
    """Return a folder's path with % doubled, because Slurm replaces %j and the like in names of log files.

    Raises UserError if the path has a backslash.
    """
    if "\\" in path:
        raise UserError(
            f"the run folder {path} contains a backslash, so Slurm would not write the logs; choose another "
            "run.root or run.name"
        )
    return path.replace("%", "%%")
