"""The command-line options of slurm/submit.py."""

import argparse

from render import TASK

from grpo_megatron.config.command import Command


def parse(description: str, arguments: list[str] | None) -> argparse.Namespace:
    """Parse the command line of submit.py.

    description: text that --help prints above the options.
    arguments: the arguments. None: those of this process.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--config", metavar="FILE", required=True, help="YAML file of the run")
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="values that override those of the file"
    )
    parser.add_argument(
        "--command",
        type=Command,
        choices=Command,
        default="train",
        help="grpo-megatron command to run; default: train",
    )
    parser.add_argument("--dry-run", action="store_true", help="print the job's script and submit nothing")
    parser.add_argument(
        "--architecture",
        metavar="FOLDER",
        help="folder with config.json, if model.path is not on this machine",
    )
    _add_nodes(parser.add_argument_group("nodes"))
    _add_programs(parser.add_argument_group("programs"))
    _add_several(parser.add_argument_group("several jobs"))
    return parser.parse_intermixed_args(arguments)


def _add_nodes(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--nodes", type=_positive, metavar="N", help="number of nodes; default: cluster.nodes")
    group.add_argument(
        "--gpus-per-node",
        type=_positive,
        metavar="N",
        help="GPUs per node; default: cluster.gpus_per_node, or none if that is not set",
    )
    group.add_argument(
        "--cpus-per-node",
        type=_positive,
        metavar="N",
        help="CPUs per node; default: all of a node with GPUs, otherwise one per process",
    )
    for name in ("partition", "account", "qos"):
        group.add_argument(f"--{name}", metavar="NAME", help=f"Slurm's {name} for the job")
    group.add_argument("--time", metavar="LIMIT", help="time limit in sbatch's format, such as 24:00:00")
    group.add_argument(
        "--interface", metavar="NAME", help="network interface of Ray, NCCL and gloo, such as ib0"
    )
    group.add_argument(
        "--start-timeout", type=_positive, metavar="SECONDS", help="time for all nodes to join; default: 300"
    )
    group.add_argument(
        "--sbatch-arg",
        action="append",
        default=[],
        metavar="ARG",
        help="argument for sbatch, as in --sbatch-arg=--exclude=n7; repeatable",
    )


def _add_programs(group: argparse._ArgumentGroup) -> None:
    container = group.add_mutually_exclusive_group()
    container.add_argument("--apptainer", metavar="IMAGE", help="run in this Apptainer image")
    container.add_argument("--pyxis", metavar="IMAGE", help="run in this image with Pyxis and Enroot")
    group.add_argument(
        "--mount",
        action="append",
        default=[],
        metavar="FROM[:TO[:OPTIONS]]",
        help="folder to mount in the container, such as /data:/data:ro; repeatable",
    )
    group.add_argument(
        "--bin",
        metavar="FOLDER",
        help="folder with the environment's programs; default: that of this Python, or of the image",
    )
    group.add_argument(
        "--env",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="variable for the job; not for secrets; repeatable",
    )
    group.add_argument(
        "--setup",
        action="append",
        default=[],
        metavar="COMMAND",
        help="shell command to run first; repeatable",
    )


def _add_several(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--dependency-chain",
        type=_positive,
        default=1,
        metavar="N",
        help="submit N jobs that continue one run, one after the other",
    )
    group.add_argument(
        "--array",
        metavar="SPEC",
        help=f"job array, such as 0-7; {TASK} in an argument is replaced by the index",
    )
    group.add_argument(
        "--requeue",
        action="store_true",
        help="queue the job again if it was stopped before the run was finished",
    )
    group.add_argument(
        "--stop-before",
        type=_positive,
        metavar="SECONDS",
        help="tell the run this long before the time limit to save and stop; default: 600 if several jobs "
        "continue the run, else the run is not told",
    )


def _positive(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and int(text)):
        raise argparse.ArgumentTypeError(f"{text} is not a positive integer")
    return int(text)
