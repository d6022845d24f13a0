"""Bytes and time of a weight sync, computed from the reshard plan and the cost model in weights.sync."""

from dataclasses import replace
from math import lcm

from grpo_megatron.capabilities import GPUS
from grpo_megatron.config.schema import Config, Placement
from grpo_megatron.model.architecture import Architecture
from grpo_megatron.model.entries import EngineLayout
from grpo_megatron.model.parallel_sizes import ParallelSizes
from grpo_megatron.planner.engines import engine_dtype
from grpo_megatron.planner.rates import LINKS, NETWORK_SECONDS
from grpo_megatron.weights.sync.cost import Cost, Machine, cost, on_nodes
from grpo_megatron.weights.sync.plan import Layouts
from grpo_megatron.weights.sync.resharding import choose_transport


def sync_cost(config: Config, arch: Architecture) -> Cost:
    """Estimate the cost of one weight sync from trainer to engines, with the run's transport.

    Transfers between nodes and within nodes are included.

    Raises UserError if the transport that is configured cannot reach the engines, for example because they
    are on other nodes.
    """
    engine, sizes = config.rollout.engine, ParallelSizes.from_config(config.megatron)
    layout, speed = EngineLayout.from_config(engine), GPUS[config.cluster.gpu].speed
    machine = Machine(speed.network / 1e9, LINKS * speed.fabric / 1e9, NETWORK_SECONDS)
    layouts = Layouts(_with_few_experts(arch, sizes, layout), sizes, layout, engine.num_engines)
    layouts = on_nodes(layouts, config.cluster.gpus_per_node, config.cluster.placement == Placement.colocated)
    itemsize = engine_dtype(arch, engine).itemsize
    _, layouts = choose_transport(config.weight_sync, layouts)
    return cost(layouts, machine, config.weight_sync.bucket_bytes, itemsize)


def _with_few_experts(arch: Architecture, sizes: ParallelSizes, engine: EngineLayout) -> Architecture:
    """Return an architecture with the same bytes in fewer, wider experts, so that planning a sync is faster.

    A reshard plan lists the transfers of every expert, which takes a minute for thousands of experts.
    Neighbouring experts are on the same trainer and engine ranks, so one wide expert can stand for several of
    them. The number of experts in the result is the least common multiple of the expert-parallel sizes of
    trainer and engine.
    """
    if arch.moe is None:
        return arch
    few = lcm(sizes.ep, engine.ep)
    width = arch.moe.ffn_hidden_size * arch.moe.num_experts // few
    return replace(arch, moe=replace(arch.moe, num_experts=few, ffn_hidden_size=width))
