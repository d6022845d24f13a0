"""The text of a Slurm job: slurm/train.sbatch with a head that holds what was asked for."""

import shlex
from dataclasses import dataclass, field
from pathlib import Path

from grpo_megatron.errors import UserError

TEMPLATE = Path(__file__).with_name("train.sbatch")
# In arguments and paths: the number of a task of an array.
TASK = "{task}"


@dataclass(frozen=True)
class Job:
    """All that a job is made of. Paths are absolute.

    cpus_per_node: None: all of each node. stop_before: seconds before the time limit at which Slurm tells the run to save and stop; None:
    never. folder: the run's, in which TASK may stand, as in arguments. arguments: of grpo-megatron after its command. launcher: what
    programs are started with. step_options: of srun, for each program. variables: environment variables of the job. setup: commands
    of the shell that come first.
    """

    name: str
    nodes: int
    folder: str
    working_folder: str
    bin: str
    arguments: list[str]
    command: str = "train"
    gpus_per_node: int | None = None
    cpus_per_node: int | None = None
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    time: str | None = None
    array: str | None = None
    stop_before: int | None = None
    requeue: bool = False
    sbatch_arguments: list[str] = field(default_factory=list)
    launcher: list[str] = field(default_factory=list)
    step_options: list[str] = field(default_factory=list)
    variables: dict[str, str] = field(default_factory=dict)
    setup: list[str] = field(default_factory=list)

    @property
    def logs(self) -> str:
        """The folder that Slurm writes into."""
        return f"{self.folder}/slurm"


def apptainer(image: str, mounts: list[str], gpus: bool) -> list[str]:
    """What a program is started with to run in this image. mounts: FROM, FROM:TO or FROM:TO:OPTIONS."""
    return [
        "apptainer",
        "exec",
        *(["--nv"] if gpus else []),
        *(part for mount in mounts for part in ("--bind", mount)),
        image,
    ]


def pyxis(image: str, mounts: list[str], working_folder: str) -> list[str]:
    """Options of srun for a program in this image. mounts: as for `apptainer`."""
    both = [mount if ":" in mount else f"{mount}:{mount}" for mount in mounts]
    # Enroot gives each container a /tmp of its own, and the programs of a node are in several: they meet in Ray's folder there.
    if not any(mount.split(":")[1] == "/tmp" for mount in both):
        both.append("/tmp:/tmp")
    return [
        f"--container-image={image}",
        f"--container-mounts={','.join(both)}",
        f"--container-workdir={working_folder}",
    ]


def render(job: Job) -> str:
    """The job's script. Raises UserError for a value that Slurm cannot be given."""
    settings = {
        "GRPO_BIN": job.bin,
        "GRPO_COMMAND": job.command,
        "GRPO_RUN": shlex.join(job.launcher),
        "GRPO_SRUN": shlex.join(job.step_options),
        "GRPO_LOGS": _pattern(job.logs),
        "GRPO_REQUEUE": "1" if job.requeue else "",
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
        # Also the empty ones: what the submitter's shell has does not reach the job.
        *(f"export {name}={shlex.quote(value)}" for name, value in settings.items()),
        shlex.join(["set", "--", *job.arguments]),
        "",
        *body,
    ]
    return "\n".join(lines) + "\n"


def _setup(command: str) -> str:
    """A line that runs it in the script's shell and ends the job if it fails."""
    failed = shlex.quote(f"error: --setup {command}: it failed with status")
    return f'eval {shlex.quote(command)} || {{ echo {failed} "$?" >&2; exit 2; }}'


def sbatch_arguments(job: Job) -> list[str]:
    """The options of sbatch, as a shell would give them. Raises UserError for a folder that Slurm cannot write its output to."""
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
        # A job that is queued again goes on in its log.
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
    """An argument of sbatch, such as --name=value, as a line after #SBATCH has it: sbatch has quotes and backslashes of its own there."""
    if not argument.isprintable():
        raise UserError(f"{argument!r} has characters that sbatch cannot be given")
    name, equals, value = argument.partition("=")
    if all(character.isalnum() or character in "-_./:,@%+=" for character in value):
        return argument
    quoted = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'{name}{equals}"{quoted}"'


def _pattern(path: str) -> str:
    """A folder as a part of a file name in which Slurm replaces %j and its like."""
    if "\\" in path:
        raise UserError(
            f"the run's folder {path} has a backslash, with which Slurm writes no logs; choose another run.root or run.name"
        )
    return path.replace("%", "%%")
