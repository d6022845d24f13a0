"""Which neighbouring devices a node must have together, so that groups which talk in every layer stay inside a node."""

from dataclasses import dataclass
from math import lcm

from grpo_megatron.errors import UserError


@dataclass(frozen=True)
class Bundles:
    """Sizes of the groups of devices that are each on one node, of the trainer's ranks and of engines with devices of their own.

    Colocated engines share those of the ranks. part: an engine's devices on one node, which are all of them unless it is larger.
    """

    ranks: tuple[int, ...]
    engines: tuple[int, ...]
    part: int


def bundles(
    num_ranks: int, group: int, num_engines: int, engine_tp: int, per_node: int, colocated: bool
) -> Bundles:
    """group: the trainer's tensor-parallel ranks, engine_tp: those of an engine. per_node: most devices of a node.

    Raises UserError where a group would be on two nodes, or an engine on several that it does not fill.
    """
    if group > per_node and num_ranks:
        raise UserError(
            f"megatron.tensor_parallel={group}: the group's ranks exchange activations in every layer and must be on one node, "
            f"which has {per_node} devices"
        )
    if engine_tp > per_node and engine_tp % per_node:
        raise UserError(
            f"rollout.engine.tensor_parallel={engine_tp}: an engine over several nodes takes all {per_node} devices of each, so it "
            f"must be a multiple of {per_node}"
        )
    part = min(engine_tp, per_node)
    if not colocated or not (num_ranks and num_engines):
        return Bundles(_cut(num_ranks, group), _cut(num_engines * engine_tp, part), part)
    both = lcm(group, part)
    if both > per_node:
        raise UserError(
            f"cluster.placement=colocated: groups of megatron.tensor_parallel={group} ranks and engines of "
            f"rollout.engine.tensor_parallel={engine_tp} on the same {per_node} devices of a node would cross nodes; make one a "
            "multiple of the other"
        )
    return Bundles(_cut(max(num_ranks, num_engines * engine_tp), both), (), part)


def _cut(total: int, size: int) -> tuple[int, ...]:
    """Parts of that size, and what is left."""
    return (size,) * (total // size) + ((total % size,) if total % size else ())
