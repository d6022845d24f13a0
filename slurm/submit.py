"""Make a Slurm job from a configuration, check it, and submit it.

    python slurm/submit.py --config configs/qwen3_8b_1node.yaml --time 24:00:00 --requeue model.path=/weights
    python slurm/submit.py --config configs/quickstart.yaml --nodes 2 --dry-run > job.sbatch

If the configuration cannot run on the nodes that are asked for, the reasons are printed at once and nothing
is queued (exit status 2). See docs/slurm.md.
"""

import argparse
import dataclasses
import re
import subprocess
import sys
from itertools import chain
from pathlib import Path

from job_checks import check_run, cpu_slots, of_command, several_jobs
from render import TASK, Job, apptainer, pyxis, render, sbatch_arguments
from sbatch_options import conflicts
from submit_arguments import parse

from grpo_megatron.capabilities import GPUS
from grpo_megatron.config.derived import most_engines
from grpo_megatron.config.load import read_config, read_sources
from grpo_megatron.config.schema import Config
from grpo_megatron.errors import UserError
from grpo_megatron.files import writing

# Folder of the programs in the images of Dockerfile and apptainer.def.
IN_IMAGE = "/opt/grpo_megatron/.venv/bin"


def prepare(options: argparse.Namespace) -> tuple[Job, list[str]]:
    """Make the job that the command line asks for, and check each of its runs.

    options: parsed command line.

    Returns (job, notes). notes: what could not be checked on this machine.

    Raises UserError if an option is wrong, or with all reasons why the run cannot work on the job's nodes.
    """
    tasks = [str(number) for number in task_numbers(options.array)] if options.array else [""]
    given = options.overrides
    of_first = [argument.replace(TASK, tasks[0]) for argument in given]
    config = with_facts(options, read_config(options.config, of_first, options.command))
    name = config.run.name
    if options.array:
        # Each task is a run of its own, with a folder next to those of the other tasks.
        if any(argument.startswith("run.root=") and TASK in argument for argument in given):
            raise UserError(f"--array: put {TASK} into run.name, not into run.root")
        named = [argument.removeprefix("run.name=") for argument in given if argument.startswith("run.name=")]
        name = next((one for one in named[-1:] if TASK in one), f"{name}_{TASK}")
        given = [argument for argument in given if not argument.startswith("run.name=")] + [
            f"run.name={name}"
        ]
    facts = {key: getattr(config.cluster, key) for key in ("gpu", "nodes", "gpus_per_node")}
    given = [
        *given,
        *_grace(options),
        *(f"cluster.{key}={value}" for key, value in facts.items() if value is not None),
    ]
    config = dataclasses.replace(config, run=dataclasses.replace(config.run, name=name))
    job = _job(options, of_command(options.command, config), given)
    if found := conflicts(job):
        raise UserError("\n".join(found))
    notes = [
        note
        for task in tasks
        for note in check_run(options, [argument.replace(TASK, task) for argument in given], task)
    ]
    return job, list(dict.fromkeys(notes))


def task_numbers(spec: str) -> list[int]:
    """Return the numbers of a job array's tasks.

    spec: the tasks as sbatch takes them, such as 0-6:2,9 or 0-7%2.

    Raises UserError for a text that sbatch would not accept, or for more than 1000 tasks.
    """
    listed, percent, at_once = spec.partition("%")
    if percent and not re.fullmatch(r"[1-9]\d*", at_once, flags=re.ASCII):
        raise UserError(f"--array {spec}: after % must come a positive number, as in 0-7%2")
    ranges: list[range] = []
    for part in listed.split(","):
        match = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9})(?::([1-9]\d*))?)?", part, flags=re.ASCII)
        if not match:
            raise UserError(
                f"--array {spec}: {part or 'an empty part'} is not a number or range such as 3, 0-7 or 0-6:2"
            )
        first, last, step = int(match[1]), int(match[2] or match[1]), int(match[3] or 1)
        ranges.append(range(first, last + 1, step))
    count = sum(map(len, ranges))
    if not 1 <= count <= 1000:
        raise UserError(f"--array {spec} has {count} tasks; it must have 1 to 1000")
    return list(chain(*ranges))


def time_limit(text: str) -> float:
    """Return the seconds of a time limit in sbatch's format; infinity for no limit (0, infinite, unlimited).

    Raises UserError for a text that sbatch would not accept.
    """
    if text.lower() in ("infinite", "unlimited"):
        return float("inf")
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", text, flags=re.ASCII)
    if not match:
        raise UserError(
            f"--time {text} must have the form MINUTES, HOURS:MINUTES:SECONDS or DAYS-HOURS:MINUTES:SECONDS"
        )
    days, parts = match[1], [int(part) for part in match.groups()[1:] if part]
    # The first number counts hours if days precede it or two numbers follow it, otherwise minutes.
    units = (3600, 60, 1) if days or len(parts) == 3 else (60, 1)
    return 86400 * int(days or 0) + sum(
        part * unit for part, unit in zip(parts, units, strict=False)
    ) or float("inf")


def with_facts(options: argparse.Namespace, config: Config) -> Config:
    """Return the configuration with the numbers of nodes and of GPUs per node that the job asks for.

    The numbers on the command line take precedence over those in the configuration. If neither has GPUs,
    cluster.gpu becomes `none`. Raises UserError if the number of nodes is not set, or if cluster.gpu names a
    GPU and the number of GPUs per node is not set.
    """
    cluster = config.cluster
    nodes, gpus = options.nodes or cluster.nodes, options.gpus_per_node or cluster.gpus_per_node
    if nodes is None:
        raise UserError("the number of nodes is not set; give --nodes, or set cluster.nodes")
    if cluster.gpu in GPUS and gpus is None:
        raise UserError(
            f"cluster.gpu={cluster.gpu} needs the number of GPUs per node; give --gpus-per-node, or set "
            "cluster.gpus_per_node"
        )
    gpu = cluster.gpu or (None if gpus else "none")
    return dataclasses.replace(
        config, cluster=dataclasses.replace(cluster, nodes=nodes, gpus_per_node=gpus, gpu=gpu)
    )


def _stop_before(options: argparse.Namespace) -> int | None:
    """Return how many seconds before the time limit Slurm tells the run to save and stop. None: never.

    Without --stop-before, this is 600 if several jobs continue the run, and None otherwise. Raises UserError
    if the time limit is not more than a minute longer, because Slurm would then stop the run at its start.
    """
    seconds = options.stop_before or (600 if several_jobs(options) else None)
    # Slurm may send the signal a minute early.
    limit = time_limit(options.time) if options.time else float("inf")
    if seconds and limit <= seconds + 60:
        raise UserError(
            f"--time {options.time} must be more than a minute longer than --stop-before ({seconds} s); "
            "raise --time or lower --stop-before"
        )
    return seconds


def _grace(options: argparse.Namespace) -> list[str]:
    """Return [run.grace_usr1=SECONDS], the time that a run has to save and end when Slurm tells it to stop.

    The time ends before the job's time limit, so that Ray can shut down. The list is empty if the user sets
    run.grace_usr1, or if Slurm does not tell the run to stop before the limit.
    """
    seconds = _stop_before(options)
    given = any(
        "grace_usr1" in (layer.values.get("run") or {})
        for layer in read_sources(options.config, options.overrides)
    )
    return [] if given or not seconds else [f"run.grace_usr1={max(seconds - 60, seconds // 2)}"]


def _job(options: argparse.Namespace, config: Config, overrides: list[str]) -> Job:
    """Return the job of a run. In a job array, run.name contains `{task}`, and overrides may contain it too.

    options: parsed command line.
    config: the configuration as the command of grpo-megatron uses it (see of_command).
    overrides: key=value arguments of the run.
    """
    here, root, file = Path.cwd(), Path(config.run.root).absolute(), Path(options.config).absolute()
    gpus, in_image = config.cluster.gpus_per_node, options.apptainer or options.pyxis
    mounts = _mounts([str(here), str(root), str(file.parent), *options.mount]) if in_image else []
    return Job(
        name=config.run.name.replace(TASK, "array"),
        nodes=config.cluster.nodes,
        folder=f"{root}/{config.run.name}",
        working_folder=str(here),
        bin=options.bin or (IN_IMAGE if in_image else str(Path(sys.executable).parent)),
        arguments=["--config", str(file), *overrides],
        command=options.command,
        gpus_per_node=gpus,
        cpus_per_node=options.cpus_per_node or (None if gpus else cpu_slots(config, options.command)),
        partition=options.partition,
        account=options.account,
        qos=options.qos,
        time=options.time,
        array=options.array,
        stop_before=_stop_before(options),
        grows=most_engines(config.rollout.engine) > config.rollout.engine.num_engines,
        requeue=options.requeue,
        sbatch_arguments=options.sbatch_arg,
        launcher=apptainer(_image(options.apptainer), mounts, bool(gpus)) if options.apptainer else [],
        step_options=pyxis(_image(options.pyxis), mounts, str(here)) if options.pyxis else [],
        variables=_variables(options),
        setup=options.setup,
    )


def _variables(options: argparse.Namespace) -> dict[str, str]:
    found = {
        "GRPO_INTERFACE": options.interface or "",
        "GRPO_START_TIMEOUT": str(options.start_timeout or ""),
    }
    for setting in options.env:
        name, equals, value = setting.partition("=")
        if not equals or not re.fullmatch(r"[A-Za-z_]\w*", name, flags=re.ASCII):
            raise UserError(f"--env {setting} must have the form NAME=VALUE")
        found[name] = value
    return found


def _image(name: str) -> str:
    """Return the absolute path of an image file. Any other name, such as docker://NAME, stays as it is."""
    return str(Path(name).absolute()) if Path(name).exists() else name


def _mounts(wanted: list[str]) -> list[str]:
    """Check mounts of the form FROM[:TO[:OPTIONS]]. Return each mount once, in the given order.

    Raises UserError for a mount that Apptainer or Pyxis would misread, such as a relative folder.
    """
    for mount in wanted:
        source, *rest = mount.split(":")
        if (
            "," in mount
            or not source.startswith("/")
            or len(rest) > 2
            or (rest and not rest[0].startswith("/"))
        ):
            raise UserError(
                f"--mount {mount} must have the form FROM, FROM:TO or FROM:TO:OPTIONS, where FROM and TO are "
                "absolute paths without commas or colons"
            )
    return list(dict.fromkeys(wanted))


def submit(job: Job, script: str, tasks: list[str], chain: int) -> list[str]:
    """Create the folders of the job's logs, queue the job `chain` times, and return the job ids.

    Each job of the chain starts when the job before it has ended.

    script: text of the job's script.
    tasks: numbers of the array's tasks; [""] if there is no array.

    Raises UserError if a folder cannot be created, if sbatch is not installed, or if Slurm refuses the job.
    Earlier jobs of the chain then stay queued.
    """
    for task in tasks:
        # Slurm does not create the folder, and a job that cannot write its output fails silently.
        folder = Path(job.logs.replace(TASK, task))
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
    queued: list[str] = []
    for _ in range(chain):
        after = [f"--dependency=afterany:{queued[-1]}"] if queued else []
        try:
            # The options are given here too, because SBATCH_* variables of the shell override the script's.
            command = ["sbatch", "--parsable", *sbatch_arguments(job), *after]
            done = subprocess.run(command, input=script, capture_output=True, text=True)
        except FileNotFoundError:
            raise UserError(
                "sbatch is not installed here; submit from a login node, or use --dry-run and submit the "
                "printed script"
            ) from None
        if done.returncode:
            before = f" (queued before it: {', '.join(queued)})" if queued else ""
            raise UserError(f"Slurm rejected the job{before}: {done.stderr.strip()}")
        # On a site with several clusters sbatch prints NUMBER;CLUSTER.
        queued.append(done.stdout.strip().partition(";")[0])
    return queued


def main(arguments: list[str] | None = None) -> int:
    options = parse(__doc__, arguments)
    try:
        job, notes = prepare(options)
        script = render(job)
        for note in notes:
            print(f"not checked: {note}", file=sys.stderr)
        if options.dry_run:
            print(script, end="")
            return 0
        tasks = [str(number) for number in task_numbers(options.array)] if options.array else [""]
        queued = submit(job, script, tasks, options.dependency_chain)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"queued as {', '.join(queued)}; output in {job.logs}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
