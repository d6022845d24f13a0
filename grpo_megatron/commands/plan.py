"""`grpo-megatron plan`: shows the memory and time that a run would take on a cluster, and whether it fits.

With --search it shows the quickest layouts (parallel sizes and placement) that fit into the GPUs' memory.
With --data it shows the bytes that a step moves.
"""

import argparse

from grpo_megatron.errors import UserError


def add_parser(commands) -> None:
    """Add the command `plan` with its options to the command line of `grpo-megatron`.

    commands: the object that ArgumentParser.add_subparsers of `grpo-megatron` returned.
    """
    parser = commands.add_parser(
        "plan", help="compute memory and time of a run, without reading weights; refuse what cannot fit"
    )
    parser.add_argument("--config", metavar="FILE", help="YAML file")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="values that override the file's")
    parser.add_argument("--nodes", type=int, metavar="N", help="number of nodes; sets cluster.nodes")
    parser.add_argument("--gpu", metavar="NAME", help="type of the GPUs, such as h100-80g; sets cluster.gpu")
    parser.add_argument(
        "--prompt-tokens",
        type=float,
        metavar="N",
        help="mean tokens of a prompt; default: half of the longest",
    )
    parser.add_argument(
        "--response-tokens",
        type=float,
        metavar="N",
        help="mean tokens of a response; default: half of the longest",
    )
    parser.add_argument(
        "--data", action="store_true", help="show the bytes that a step moves and the driver's CPU time"
    )
    parser.add_argument(
        "--search", action="store_true", help="list the five quickest layouts that are legal and fit"
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Execute `grpo-megatron plan`: print the memory and time that a run would take. Return exit status 0.

    With --search, print the quickest layouts (parallel sizes and placement) instead. With --data, print the
    bytes that a step moves, and the driver's CPU time. Raises UserError if both options are given, or if the
    configuration is invalid, cannot be planned, or needs more memory than the GPUs have.
    """
    from grpo_megatron.config.load import read_config
    from grpo_megatron.planner.advice import checked_plan, planned_architecture, searched_plans
    from grpo_megatron.planner.lengths import Lengths
    from grpo_megatron.planner.text import data_text, plan_text, search_text
    from grpo_megatron.planner.traffic import StepData

    if options.search and options.data:
        raise UserError(
            "--data shows the data of one layout, but --search lists several; leave --search out, and give "
            "the settings of the layout as key=value"
        )
    facts = [
        f"cluster.{key}={value}"
        for key, value in (("nodes", options.nodes), ("gpu", options.gpu))
        if value is not None
    ]
    config = read_config(options.config, [*options.overrides, *facts])
    arch = planned_architecture(config)
    lengths = Lengths.given(config, options.prompt_tokens, options.response_tokens)
    if options.search:
        print(search_text(config, searched_plans(config, arch, lengths), lengths))
        return 0
    found = checked_plan(config, arch, lengths)
    if options.data:
        print(data_text(found, StepData(config, arch, lengths).traffic(), lengths))
    else:
        print(plan_text(found, lengths))
    return 0
