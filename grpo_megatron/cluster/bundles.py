"""Sizes of the bundles of a run. A bundle is a set of devices that Ray reserves together on one node.

The processes of a tensor-parallel group exchange data in every layer. So a group of trainer ranks must not
cross nodes, and an engine may only do so if it is larger than a node.
"""

from dataclasses import dataclass
from math import lcm

from grpo_megatron.config.schema import MegatronConfig
from grpo_megatron.errors import UserError


@dataclass(frozen=True)
class Bundles:
    """The bundles of a run. A bundle is a set of devices that Ray reserves together on one node.

    ranks: number of devices in each bundle for trainer ranks, or for ranks and engines that share devices
    engines: number of devices in each bundle for engines only; empty if engines share the ranks' devices
    part: number of devices that one engine uses on each of its nodes: the engine's tensor-parallel size, or
        all devices of a node if the engine needs several nodes
    """

    ranks: tuple[int, ...]
    engines: tuple[int, ...]
    part: int


def bundles(
    num_ranks: int, trainer_tp: int, num_engines: int, engine_tp: int, per_node: int, colocated: bool
) -> Bundles:
    """Divide the devices of a run into bundles, so that no tensor-parallel group of ranks crosses nodes.

    num_ranks: number of trainer ranks
    trainer_tp: tensor-parallel size of the trainer
    num_engines: number of engines
    engine_tp: tensor-parallel size of an engine
    per_node: number of devices of the largest node
    colocated: True if engines and ranks share devices

    Raises UserError in these cases:

    - A tensor-parallel group of ranks is larger than a node.
    - An engine needs several nodes, but not all devices of each.
    - Ranks and engines share devices, and a node has fewer devices than the least common multiple of the two
      tensor-parallel sizes (the engine's counts as `per_node` if it is larger).
    """
    if trainer_tp > per_node and num_ranks:
        raise UserError(
            f"megatron.tensor_parallel={trainer_tp} exceeds the {per_node} devices of a node; a group's "
            "ranks exchange activations in every layer and must be on one node, so set it to at most "
            f"{per_node}"
        )
    if engine_tp > per_node and engine_tp % per_node:
        raise UserError(
            f"rollout.engine.tensor_parallel={engine_tp} must be a multiple of {per_node}, because an engine "
            f"on several nodes uses all {per_node} devices of each"
        )
    part = min(engine_tp, per_node)
    if not colocated or not (num_ranks and num_engines):
        return Bundles(_cut(num_ranks, trainer_tp), _cut(num_engines * engine_tp, part), part)
    both = lcm(trainer_tp, part)
    if both > per_node:
        raise UserError(
            f"cluster.placement=colocated: with megatron.tensor_parallel={trainer_tp} and "
            f"rollout.engine.tensor_parallel={engine_tp} on the same {per_node} devices of a node, groups of "
            "ranks would cross nodes; make one a multiple of the other"
        )
    return Bundles(_cut(max(num_ranks, num_engines * engine_tp), both), (), part)


def _cut(total: int, size: int) -> tuple[int, ...]:
    """Split `total` devices into bundles of `size` devices, and return the size of each bundle.

    If `total` is not a multiple of `size`, the last bundle is smaller.
    """
    return (size,) * (total // size) + ((total % size,) if total % size else ())


def neighbouring_stages(slots: list, layout: MegatronConfig, per_node: int) -> list:
    """Reorder the ranks' slots so that the pipeline stages of each replica are on neighbouring nodes.

    Megatron numbers the ranks stage by stage. If ranks took the slots in the order of nodes, the first stages
    of all replicas would come before any second stage, and the stages of one replica would be far apart.

    Slots are moved only in blocks. A block consists of whole nodes and of whole expert-parallel groups,
    because the ranks of a node or of such a group exchange more data than stages do.

    slots: a slot (device, see placement.Slot) for each rank, sorted by node.
    layout: the parallel sizes of the trainer.
    per_node: number of devices of the largest node.

    Returns the slots in rank order. The order is the given one if a stage cannot be divided into whole
    blocks, or if the number of slots does not match `layout`.
    """
    of_replica = layout.tensor_parallel * layout.context_parallel
    of_stage = of_replica * layout.data_parallel
    block = lcm(of_replica, layout.expert_parallel * layout.expert_tensor_parallel, per_node)
    num_stages = layout.pipeline_parallel
    if len(slots) != of_stage * num_stages or of_stage % block:
        return slots
    stages, replicas = range(num_stages), range(of_stage // block)
    firsts = [(replica * num_stages + stage) * block for stage in stages for replica in replicas]
    return [slot for first in firsts for slot in slots[first : first + block]]
