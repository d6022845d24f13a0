"""The plan of a configuration: its memory and times, or the reasons why the GPUs have too little memory."""

from dataclasses import dataclass, replace

from grpo_megatron.config.schema import Config
from grpo_megatron.model.architecture import Architecture
from grpo_megatron.planner.lengths import Lengths
from grpo_megatron.planner.memory import Memory, memory
from grpo_megatron.planner.resharding import sync_cost
from grpo_megatron.planner.states import training_states
from grpo_megatron.planner.time import Times, times
from grpo_megatron.weights.sync.cost import Cost


@dataclass(frozen=True)
class Plan:
    """Estimated memory and times of a run, for one configuration and one cluster."""

    config: Config
    """The configuration, which includes the cluster."""
    memory: Memory
    """The estimated memory."""
    problems: tuple[str, ...]
    """One sentence for each reason why the GPUs have too little memory; empty if they have enough."""
    times: Times | None = None
    """Estimated times of a step; None if the GPUs have too little memory."""
    sync: Cost | None = None
    """Estimated cost of a weight sync; None if it is not computed, or if the GPUs have too little memory."""

    @property
    def fits(self) -> bool:
        """True if the GPUs have enough memory, including a KV cache for one sequence of maximum length."""
        return not self.problems


def plan(config: Config, arch: Architecture, lengths: Lengths | None = None, with_sync: bool = True) -> Plan:
    """Estimate the memory of a run, and its times if the GPUs have enough memory.

    config: must break no rule, train the whole model, and state cluster.gpu (a name in GPUS), cluster.nodes
        and cluster.gpus_per_node.
    arch: architecture of the model.
    lengths: mean lengths of prompts and responses; None: half of the maximum lengths.
    with_sync: compute the time of the weight sync too, which takes seconds for large models.
    """
    found = memory(config, arch)
    problems = tuple(_problems(config, found))
    if problems:
        return Plan(config, found, problems)
    lengths = lengths or Lengths.given(config)
    taken = times(config, arch, training_states(arch, config.megatron), found.room, lengths)
    if not with_sync:
        return Plan(config, found, problems, taken)
    sync = sync_cost(config, arch)
    taken = replace(taken, seconds=taken.seconds | {"weight sync": sync.seconds})
    return Plan(config, found, problems, taken, sync)


def _problems(config: Config, found: Memory) -> list[str]:
    card = f"{gb(found.usable)} of the {gb(found.capacity)} GB of {config.cluster.gpu}"
    sentences = []
    for moment in found.moments:
        if moment.total > found.usable:
            largest = sorted(moment.items.items(), key=lambda item: -item[1])[:4]
            what = ", ".join(f"{name} {gb(size)}" for name, size in largest)
            sentences.append(
                f"{moment.name} takes {gb(moment.total)} GB of a GPU, more than the usable {card}: {what}"
            )
    longest = config.data.max_prompt_length + config.rollout.max_response_length
    if found.room.requests < 1:
        sentences.append(
            "an engine has no room for the recurrent states of one request "
            f"(rollout.engine.mem_fraction={config.rollout.engine.mem_fraction:g})"
        )
    if found.room.tokens < longest:
        sentences.append(
            f"an engine has room for {found.room.tokens:,} tokens in its KV cache beside "
            f"{gb(found.engine_weights)} GB of weights "
            f"(rollout.engine.mem_fraction={config.rollout.engine.mem_fraction:g}), but one sequence may "
            f"have {longest:,}"
        )
    return sentences


def gb(size: float) -> str:
    """Format a number of bytes in units of 10**9 bytes, such as `12.3`."""
    return f"{size / 1e9:.1f}"
