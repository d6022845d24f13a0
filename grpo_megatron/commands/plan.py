"""`grpo-megatron plan`: what a run would take of a cluster, whether it fits, and what would."""

import argparse

from grpo_megatron.config.schema import Config
from grpo_megatron.config.load import read_config
from grpo_megatron.errors import UserError
from grpo_megatron.model.architecture import Architecture
from grpo_megatron.model.families import read_architecture
from grpo_megatron.planner.plan import Plan, knows, plan
from grpo_megatron.planner.search import least_changes, search, with_values
from grpo_megatron.planner.text import changes_text, cluster_text, plan_text, search_text
from grpo_megatron.planner.time import Lengths
from grpo_megatron.preflight.model import architecture_violations
from grpo_megatron.preflight.rules import violations

# A cluster this many times as large is the last one that is asked about, if a model fits none of the smaller ones.
_MOST_GROWTH = 64


def add_parser(commands) -> None:
    """commands: what ArgumentParser.add_subparsers returns."""
    parser = commands.add_parser("plan", help="memory and time of a run by arithmetic; refuses what cannot fit; no weights are read")
    parser.add_argument("--config", metavar="FILE", help="YAML file")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="values that override the file's")
    parser.add_argument("--nodes", type=int, metavar="N", help="cluster.nodes")
    parser.add_argument("--gpu", metavar="NAME", help="cluster.gpu, such as h100-80g")
    parser.add_argument("--prompt-tokens", type=float, metavar="N", help="mean tokens of a prompt; default: half of the longest")
    parser.add_argument("--response-tokens", type=float, metavar="N", help="mean tokens of a response; default: half of the longest")
    parser.add_argument("--search", action="store_true", help="the five quickest layouts that are legal and fit")


def run(options: argparse.Namespace) -> int:
    """Exit status 0. Raises UserError for a configuration that is not legal, that cannot be planned, or that does not fit."""
    facts = [f"cluster.{key}={value}" for key, value in (("nodes", options.nodes), ("gpu", options.gpu)) if value is not None]
    config = read_config(options.config, [*options.overrides, *facts])
    arch = _architecture(config)
    lengths = _lengths(config, options)
    if options.search:
        found = search(config, arch, lengths)
        if not found:
            raise UserError(f"no layout of {config.model.path} fits {cluster_text(config)}" + _larger(config, arch, lengths))
        print(search_text(config, found, lengths))
        return 0
    found = checked_plan(config, arch, lengths)
    print(plan_text(found, lengths, config.cluster.nodes * config.cluster.gpus_per_node))
    return 0


def checked_plan(config: Config, arch: Architecture, lengths: Lengths) -> Plan:
    """Raises UserError, which says what would fit, for a configuration that is not legal or does not fit."""
    broken = violations(config) + architecture_violations(config, arch)
    if broken:
        raise UserError("the configuration is not legal:\n" + "\n".join(f"  - {rule}" for rule in dict.fromkeys(broken)))
    found = plan(config, arch, lengths)
    if found.fits:
        return found
    problems = "\n".join(f"  - {problem}" for problem in found.problems)
    raise UserError(
        f"{config.model.path} does not fit {cluster_text(config)}:\n{problems}\nwhat would fit:{_what_would(config, arch, lengths)}"
    )


def _architecture(config: Config) -> Architecture:
    if not knows(config):
        raise UserError(
            "the cluster is not known: set cluster.gpu (or --gpu), cluster.nodes (or --nodes) and cluster.gpus_per_node; "
            "there are no plans for machines without a GPU"
        )
    if config.megatron.lora.rank:
        raise UserError("a plan is of the whole model's training; it cannot be made with megatron.lora.rank")
    if config.rollout.replay:
        raise UserError("a plan is of a run with engines; leave rollout.replay out")
    return read_architecture(config.model.path)


def _lengths(config: Config, options: argparse.Namespace) -> Lengths:
    assumed = Lengths.assumed(config)
    prompt, response = options.prompt_tokens or assumed.prompt, options.response_tokens or assumed.response
    for name, mean, most in (
        ("prompt", prompt, config.data.max_prompt_length),
        ("response", response, config.rollout.max_response_length),
    ):
        if not 0 < mean <= most:
            raise UserError(f"--{name}-tokens={mean:g} must be above 0 and at most the longest {name}, {most} tokens")
    return Lengths(prompt, response)


def _what_would(config: Config, arch: Architecture, lengths: Lengths) -> str:
    found = []
    changed = least_changes(config, arch)
    if changed:
        found.append(f"the same layout with {changes_text(config, changed.config)}")
    best = search(config, arch, lengths, count=1)
    if best:
        found.append(f"the quickest layout (--search has more) with {changes_text(config, best[0].config)}")
    if not found:
        return _larger(config, arch, lengths)
    return "".join(f"\n  - {each}" for each in found)


def _larger(config: Config, arch: Architecture, lengths: Lengths) -> str:
    """What would fit on more nodes."""
    growth = 2
    while growth <= _MOST_GROWTH:
        larger = with_values(config, "cluster", nodes=growth * config.cluster.nodes)
        best = search(larger, arch, lengths, count=1)
        if best:
            return f"\n  - {cluster_text(larger)}, with {changes_text(config, best[0].config)}"
        growth *= 2
    return f"\n  - no layout on up to {_MOST_GROWTH} times as many nodes; choose a GPU with more memory"
