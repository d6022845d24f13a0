"""Plans for `grpo-megatron plan`, with advice if the cluster's GPUs have too little memory."""

from grpo_megatron.capabilities import GPUS
from grpo_megatron.config.load import must_be_legal
from grpo_megatron.config.schema import Config
from grpo_megatron.errors import UserError
from grpo_megatron.model.architecture import Architecture
from grpo_megatron.model.families import read_architecture
from grpo_megatron.planner.lengths import Lengths
from grpo_megatron.planner.memory import most_engine_fraction
from grpo_megatron.planner.plan import Plan, plan
from grpo_megatron.planner.search import (
    broken_in_any_layout,
    broken_rules,
    least_changes,
    search,
    with_values,
)
from grpo_megatron.planner.text import changes_text, cluster_text

# If a model does not fit, clusters with this many times the number of nodes are tried in turn.
_GROWTHS = (2, 4, 8, 16, 32, 64)


def planned_architecture(config: Config) -> Architecture:
    """Check that the planner supports this configuration, and return the architecture of model.path.

    Raises UserError in these cases:

    - cluster.gpu is not a known GPU, or cluster.nodes or cluster.gpus_per_node is not set
    - the run uses LoRA, or replays samples (rollout.replay)
    - the model's config.json cannot be read
    """
    cluster = config.cluster
    if cluster.gpu not in (None, "none", *GPUS):
        raise UserError(f"cluster.gpu={cluster.gpu} is unknown; choose one of {', '.join(GPUS)}")
    if cluster.gpu not in GPUS or cluster.nodes is None or cluster.gpus_per_node is None:
        raise UserError(
            "the planner needs a cluster with GPUs: set cluster.gpu (or --gpu), cluster.nodes (or --nodes) "
            "and cluster.gpus_per_node"
        )
    if config.megatron.lora.rank:
        raise UserError("the planner does not support LoRA; leave megatron.lora.rank out")
    if config.rollout.replay:
        raise UserError("the planner cannot plan a replay, which runs no engines; remove rollout.replay")
    return read_architecture(config.model.path)


def checked_plan(config: Config, arch: Architecture, lengths: Lengths, with_sync: bool = True) -> Plan:
    """Compute the plan (memory and times) of a configuration, and check that the run is possible.

    Raises UserError if the configuration breaks a rule. Raises UserError also if the GPUs have too little
    memory. This message names settings, layouts or clusters with which the memory is enough, if any were
    found.

    arch: architecture of the model.
    lengths: mean lengths of prompts and responses.
    with_sync: compute the time of the weight sync too, which takes seconds for large models.
    """
    must_be_legal(broken_rules(config, arch))
    found = plan(config, arch, lengths, with_sync)
    if found.fits:
        return found
    problems = "\n".join(f"  - {problem}" for problem in found.problems)
    raise UserError(
        f"{config.model.path} does not fit {cluster_text(config)}:\n{problems}\nwhat would "
        f"fit:{_advice(config, arch, lengths)}"
    )


def searched_plans(config: Config, arch: Architecture, lengths: Lengths) -> list[Plan]:
    """Search for the fastest layouts (parallel sizes and placement) on the cluster, and return their plans.

    The layouts break no rule, and the GPUs have enough memory for them. The list has one to five plans, the
    fastest first.

    Raises UserError if some rules are broken in every layout; the message lists these rules. Raises UserError
    also if the GPUs have too little memory in all layouts; the message then names settings or clusters with
    which the memory is enough.

    arch: architecture of the model.
    lengths: mean lengths of prompts and responses.
    """
    must_be_legal(broken_in_any_layout(config, arch))
    found = search(config, arch, lengths)
    if not found:
        raise UserError(
            f"no layout of {config.model.path} fits {cluster_text(config)}; what would "
            f"fit:{_advice_on_clusters(config, arch, lengths)}"
        )
    return found


def _advice(config: Config, arch: Architecture, lengths: Lengths) -> str:
    """Return advice, as lines of text, for a configuration that needs more memory than the GPUs have.

    One line names the fewest changes with which the configured layout fits. Another line names the fastest of
    all layouts that fit. If neither exists, the advice is a larger cluster or another memory share of the
    engines.
    """
    found = []
    changed = least_changes(config, arch)
    if changed:
        found.append(f"the same layout with {changes_text(config, changed.config)}")
    best = search(config, arch, lengths, count=1)
    if best:
        found.append(f"the fastest layout (--search lists more) with {changes_text(config, best[0].config)}")
    if not found:
        return _advice_on_clusters(config, arch, lengths)
    return "".join(f"\n  - {each}" for each in found)


def _advice_on_clusters(config: Config, arch: Architecture, lengths: Lengths) -> str:
    """Return advice, as a line of text, if the model does not fit the configured cluster in any layout.

    The advice is to change rollout.engine.mem_fraction, or to use 2 to 64 times as many nodes. It names the
    fastest layout that fits after this change. If no layout fits even on 64 times as many nodes, the text
    says so.
    """
    fitting = with_values(config, "rollout.engine", mem_fraction=most_engine_fraction(config.cluster.gpu))
    # More nodes do not help an engine whose mem_fraction is too large for a GPU: try the smaller one.
    grown = min(config, fitting, key=lambda each: each.rollout.engine.mem_fraction)
    larger = [with_values(grown, "cluster", nodes=growth * config.cluster.nodes) for growth in _GROWTHS]
    for other in (fitting, *larger):
        best = search(other, arch, lengths, count=1)
        if best:
            return f"\n  - {cluster_text(other)}, with {changes_text(config, best[0].config)}"
    return f"\n  - no layout on up to {_GROWTHS[-1]} times as many nodes; choose a GPU with more memory"
