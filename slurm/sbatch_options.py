"""Options of sbatch that submit.py sets itself. --sbatch-arg is refused if it contradicts them."""

import re
from collections.abc import Iterator

from render import Job

_SUBMITS = "leave it out, because submit.py runs sbatch itself and reads its output"
_TASKS = "leave it out, because the job script needs one task per node"
_GPUS = "use --gpus-per-node"
_CPUS = "use --cpus-per-node"
_LOGS = "set run.root and run.name instead, because the log is written to the run folder"
_WHOLE = "the job takes whole nodes; use --cpus-per-node to request a part of each"

# {long name: (short form or "", what the user should do instead)}
_SET: dict[str, tuple[str, str]] = {
    "job-name": ("J", "set run.name"),
    "nodes": ("N", "use --nodes"),
    "ntasks": ("n", _TASKS),
    "ntasks-per-node": ("", _TASKS),
    "ntasks-per-core": ("", _TASKS),
    "ntasks-per-gpu": ("", _TASKS),
    "ntasks-per-socket": ("", _TASKS),
    "gpus": ("G", _GPUS),
    "gpus-per-node": ("", _GPUS),
    "gpus-per-socket": ("", _GPUS),
    "gpus-per-task": ("", _GPUS),
    "cpus-per-task": ("c", _CPUS),
    "cpus-per-gpu": ("", _CPUS),
    "tres-per-task": ("", "use --cpus-per-node and --gpus-per-node"),
    "partition": ("p", "use --partition"),
    "account": ("A", "use --account"),
    "qos": ("q", "use --qos"),
    "time": ("t", "use --time"),
    "array": ("a", "use --array"),
    "chdir": ("D", "run submit.py in the folder that the job is to work in"),
    "output": ("o", _LOGS),
    "open-mode": ("", _LOGS),
    "signal": ("", "use --stop-before"),
    "requeue": ("", "use --requeue"),
    "no-requeue": ("", "leave out --requeue"),
    "parsable": ("", _SUBMITS),
    "test-only": ("", "use --dry-run"),
    "wrap": ("", "use --setup for commands that come first"),
    "help": ("h", _SUBMITS),
    "usage": ("", _SUBMITS),
    "version": ("V", _SUBMITS),
}
_SET_WITH_WHOLE_NODES = {
    "exclusive": ("", _WHOLE),
    "oversubscribe": ("s", _WHOLE),
    "mem": ("", _WHOLE),
    "mem-per-cpu": ("", _WHOLE),
    "mem-per-gpu": ("", _WHOLE),
}


def conflicts(job: Job) -> list[str]:
    """Return an error message for each of job.sbatch_arguments that is no option, or that submit.py sets.

    An option is recognised by its full long name, such as --nodes=4, and by its short form, such as -N4.
    """
    known = _SET | ({} if job.cpus_per_node else _SET_WITH_WHOLE_NODES)
    return [
        f"--sbatch-arg={argument}: {problem}"
        for argument in job.sbatch_arguments
        for problem in _problems(argument, job, known)
    ]


def _problems(argument: str, job: Job, known: dict[str, tuple[str, str]]) -> Iterator[str]:
    if not argument or not argument.startswith("-") or not argument.strip("-"):
        yield "an sbatch option must start with - and have a name"
        return
    name, _, value = argument.removeprefix("--").partition("=")
    if not argument.startswith("--"):
        letter = argument[1]
        yield from (
            f"-{letter} is --{full}: {instead}" for full, (short, instead) in known.items() if short == letter
        )
    elif name == "gres":
        wanted = _gpus_in(value)
        if wanted not in (None, job.gpus_per_node):
            yield (
                f"it requests {wanted} GPUs per node, but the job requests {job.gpus_per_node or 0}; {_GPUS}"
            )
    elif name in known:
        yield known[name][1]


def _gpus_in(value: str) -> int | None:
    """Return how many GPUs per node a --gres value asks for; None if it asks for no GPUs."""
    found = [
        re.fullmatch(r"gpu(?::[A-Za-z][\w.-]*)?(?::(\d+))?", part.partition("(")[0], re.ASCII)
        for part in value.split(",")
    ]
    counts = [int(match[1] or 1) for match in found if match]
    return sum(counts) if counts else None
