"""Sizes of the bundles, which are the groups of devices that Ray must reserve together on one node.

The processes of a tensor-parallel group exchange data in every layer, so a group must not cross nodes.
"""

from dataclasses import dataclass
from math import lcm

from grpo_megatron.errors import UserError


@dataclass(frozen=True)
class Bundles:
    """Sizes of a run's bundles in devices. A bundle is devices that Ray reserves together on one node.

    ranks: size of each bundle for trainer ranks
    engines: size of each bundle for engines; empty if the engines share the devices of the ranks
    part: number of devices that an engine has on each of its nodes. This is the engine's tensor-parallel
        size, or the size of a node if the engine is larger than a node.
    """

    ranks: tuple[int, ...]
    engines: tuple[int, ...]
    part: int


def bundles(
    num_ranks: int, group: int, num_engines: int, engine_tp: int, per_node: int, colocated: bool
) -> Bundles:
    """Return the sizes of the bundles of devices that a run must reserve from Ray.

    num_ranks: number of trainer ranks
    group: tensor-parallel size of the trainer
    engine_tp: tensor-parallel size of an engine
    per_node: number of devices of the largest node
    colocated: True if engines and ranks share devices

    Raises UserError if a tensor-parallel group of ranks would cross nodes, or if an engine would take several
    nodes without using all devices of each.
    """
    if group > per_node and num_ranks:
        raise UserError(
            f"megatron.tensor_parallel={group} exceeds the {per_node} devices of a node; a group's ranks "
            f"exchange activations in every layer and must be on one node, so set it to at most {per_node}"
        )
    if engine_tp > per_node and engine_tp % per_node:
        raise UserError(
            f"rollout.engine.tensor_parallel={engine_tp} must be a multiple of {per_node}, because an engine "
            f"on several nodes uses all {per_node} devices of each"
        )
    part = min(engine_tp, per_node)
    if not colocated or not (num_ranks and num_engines):
        return Bundles(_cut(num_ranks, group), _cut(num_engines * engine_tp, part), part)
    both = lcm(group, part)
    if both > per_node:
        raise UserError(
            f"cluster.placement=colocated: with megatron.tensor_parallel={group} and "
            f"rollout.engine.tensor_parallel={engine_tp} on the same {per_node} devices of a node, groups of "
            "ranks would cross nodes; make one a multiple of the other"
        )
    return Bundles(_cut(max(num_ranks, num_engines * engine_tp), both), (), part)


def _cut(total: int, size: int) -> tuple[int, ...]:
    """Split `total` devices into bundles of `size`, and return the size of each bundle.

    A remainder becomes a last, smaller bundle.
    """
    return (size,) * (total // size) + ((total % size,) if total % size else ())
