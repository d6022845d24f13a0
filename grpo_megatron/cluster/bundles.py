"""Sizes of the groups of devices that must be on one node together.

The processes of a tensor-parallel group exchange data in every layer, so a group must not cross nodes.
"""

from dataclasses import dataclass
from math import lcm

from grpo_megatron.errors import UserError


@dataclass(frozen=True)
class Bundles:
    """Sizes of the groups of devices that are each on one node.

    ranks: groups of the trainer's ranks
    engines: groups of engines with devices of their own; colocated engines share those of the ranks
    part: devices of an engine on one node: all of them, unless the engine is larger than a node
    """

    ranks: tuple[int, ...]
    engines: tuple[int, ...]
    part: int


def bundles(
    num_ranks: int, group: int, num_engines: int, engine_tp: int, per_node: int, colocated: bool
) -> Bundles:
    """Return the groups of devices that this many ranks and engines need.

    group: tensor-parallel size of the trainer
    engine_tp: tensor-parallel size of an engine
    per_node: most devices of a node

    Raises UserError if a group would cross nodes, or an engine would take several nodes without filling each.
    """
    if group > per_node and num_ranks:
        raise UserError(
            f"megatron.tensor_parallel={group}: the group's ranks exchange activations in every layer and "
            f"must be on one node, which has {per_node} devices"
        )
    if engine_tp > per_node and engine_tp % per_node:
        raise UserError(
            f"rollout.engine.tensor_parallel={engine_tp}: an engine over several nodes takes all {per_node} "
            f"devices of each, so it must be a multiple of {per_node}"
        )
    part = min(engine_tp, per_node)
    if not colocated or not (num_ranks and num_engines):
        return Bundles(_cut(num_ranks, group), _cut(num_engines * engine_tp, part), part)
    both = lcm(group, part)
    if both > per_node:
        raise UserError(
            f"cluster.placement=colocated: groups of megatron.tensor_parallel={group} ranks and engines of "
            f"rollout.engine.tensor_parallel={engine_tp} on the same {per_node} devices of a node would "
            "cross nodes; make one a multiple of the other"
        )
    return Bundles(_cut(max(num_ranks, num_engines * engine_tp), both), (), part)


def _cut(total: int, size: int) -> tuple[int, ...]:
    """Split `total` into parts of `size`. A remainder becomes a last, smaller part."""
    return (size,) * (total // size) + ((total % size,) if total % size else ())
