"""Checks of a job before it is queued: the run's configuration, and the memory and CPUs of its nodes."""

import argparse
import os
from pathlib import Path

from grpo_megatron.capabilities import GPUS
from grpo_megatron.cluster.bundles import bundles
from grpo_megatron.commands.evaluate import evaluation_config
from grpo_megatron.config.command import Command
from grpo_megatron.config.derived import scores_on_ranks
from grpo_megatron.config.load import read_config
from grpo_megatron.config.schema import Config, Placement
from grpo_megatron.errors import UserError
from grpo_megatron.model.families import read_architecture
from grpo_megatron.paths import folder_problem, is_absent
from grpo_megatron.planner.advice import checked_plan
from grpo_megatron.planner.lengths import Lengths
from grpo_megatron.preflight.check import check
from grpo_megatron.preflight.cluster_rules import num_processes


def check_run(options: argparse.Namespace, overrides: list[str], task: str) -> list[str]:
    """Check one run of a job before it is queued. Return notes about what cannot be checked on this machine.

    options: parsed command line of submit.py.
    overrides: key=value arguments of the run.
    task: number of the run in a job array, or empty.

    Raises UserError with everything that is wrong with the run.
    """
    report = check(options.config, overrides, options.command)
    if not report.violations:
        config = of_command(options.command, read_config(options.config, overrides, options.command))
        if options.command == Command.eval and (several_jobs(options) or options.stop_before):
            report.violations.append(
                "an evaluation cannot be continued and would start over in every job; leave out --requeue, "
                "--dependency-chain and --stop-before, and set --time to all the time that it needs"
            )
        elif several_jobs(options) and config.run.resume != "auto":
            report.violations.append(
                "with --requeue or --dependency-chain, each job would start over; set run.resume=auto"
            )
        if options.cpus_per_node and options.cpus_per_node < (needed := cpu_slots(config, options.command)):
            report.violations.append(
                f"--cpus-per-node {options.cpus_per_node} is too small; each rank and engine takes a CPU "
                f"even if it has a GPU, so this run needs at least {needed}"
            )
        too_large, unknown = memory_problems(config, options.architecture, options.command)
        report.violations += too_large
        report.not_checked += unknown
        if options.dry_run and (problem := _unwritable(Path(config.run.root).absolute())):
            report.not_checked.append(f"run.root: {problem} here, so no logs could be written")
    if report.violations:
        of_task = f" for task {task} of the array" if task else ""
        raise UserError(
            f"nothing was submitted{of_task}:\n"
            + "\n".join(f"  - {problem}" for problem in report.violations)
        )
    return report.not_checked


def of_command(command: Command, config: Config) -> Config:
    """Return the configuration that a grpo-megatron command really uses, for the checks of the job.

    Only `eval` changes the configuration (see evaluation_config): the run's name gets the suffix _eval, and
    the engines have devices of their own, because there are no trainer ranks. Raises UserError if model.path
    is a checkpoint that `eval` cannot load.
    """
    return evaluation_config(config) if command == Command.eval else config


def _unwritable(folder: Path) -> str | None:
    """Return the reason why a folder cannot be written to; None if it can. Nothing is created to find out.

    If the folder does not exist, the nearest existing folder above it is checked instead.
    """
    there = next(path for path in (folder, *folder.parents) if not is_absent(path))
    if problem := folder_problem(there):
        return f"{there} {problem}"
    return None if os.access(there, os.W_OK) else f"{there} cannot be written to"


def memory_problems(
    config: Config, architecture: str | None, command: Command
) -> tuple[list[str], list[str]]:
    """Check that a training run fits into the GPUs' memory.

    Returns (problems, notes). problems: what does not fit. notes: why memory could not be checked. Both are
    empty if the memory is enough.

    architecture: folder with the model's config.json, in place of model.path. None: use model.path.
    command: command of grpo-megatron. Memory is computed for `train` only.
    """
    cluster, folder = config.cluster, architecture or config.model.path
    if architecture and (problem := folder_problem(architecture)):
        return [
            f"--architecture {architecture} {problem}; it must be a folder with the model's config.json"
        ], []
    if cluster.gpu not in GPUS or command != Command.train:
        unused = "memory: --architecture has no effect without --command train and a known cluster.gpu"
        return [], [unused] if architecture else []
    if config.megatron.lora.rank:
        return [], ["memory: the planner does not support adapters (megatron.lora.rank)"]
    if is_absent(folder):
        return [], [
            f"memory: {folder} does not exist here; give a folder with the model's config.json as "
            "--architecture"
        ]
    if scores_on_ranks(config) and is_absent(config.reward.model.path):
        return [], [
            f"memory: the folder of the reward model, {config.reward.model.path}, does not exist here"
        ]
    try:
        checked_plan(config, read_architecture(folder), Lengths.given(config), with_sync=False)
    except UserError as error:  # its message tells what would fit
        return [str(error)], []
    return [], []


def cpu_slots(config: Config, command: Command) -> int:
    """Return the fewest CPUs per node with which every rank and engine process gets one.

    Processes that must share a node, such as a tensor-parallel group, are kept on one node. A process takes a
    CPU even if it has a GPU, because cluster.placement.allocate asks Ray for both.

    config: the configuration, with cluster.nodes set.

    Raises UserError with the reason if no number of CPUs is enough for the layout.
    """
    engine, colocated = config.rollout.engine, config.cluster.placement == Placement.colocated
    ranks, engines = num_processes(config, command)
    reason = f"cluster.nodes={config.cluster.nodes} is too small for the processes that must share a node"
    for cpus in range(1, ranks + engines * engine.tensor_parallel + 1):
        try:
            devices = config.cluster.gpus_per_node or cpus
            wanted = bundles(
                ranks, config.megatron.tensor_parallel, engines, engine.tensor_parallel, devices, colocated
            )
        except UserError as error:  # a group needs more devices than a node has
            reason = str(error)
            continue
        free = [cpus] * config.cluster.nodes
        for size in sorted((*wanted.ranks, *wanted.engines), reverse=True):
            free.sort(reverse=True)
            free[0] -= size
        if min(free) >= 0:
            return cpus
    raise UserError(f"this layout does not fit, however many CPUs a node has: {reason}")


def several_jobs(options: argparse.Namespace) -> bool:
    return options.requeue or options.dependency_chain > 1
