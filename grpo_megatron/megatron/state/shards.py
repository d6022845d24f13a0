"""Rectangles of global tensors that a rank holds: what it writes to a checkpoint, or reads from one.

A global tensor is a parameter, or its optimizer state, as it would be without parallelism. Megatron says
where a parameter's shard lies in the global tensor (`sharded_state_dict`). The distributed optimizer holds a
flat range of that shard. A flat range of a matrix is at most three rectangles: part of a row, whole rows,
part of a row. So every rank can write and read its own part of the optimizer where it lies, without
gathering, and any other layout can assemble the rectangles again.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from megatron.core import parallel_state as mpu
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, ShardedTensorFactory

# Most elements of a piece; larger pieces are divided. torch.save copies a piece while it is written, and a
# piece is read as a whole.
_MOST_ELEMENTS = 4 * 2**20


@dataclass(frozen=True)
class Rectangle:
    """Rectangular part of a global tensor, with its values in memory.

    A global tensor is a parameter, or an optimizer state of it, as it would be without parallelism.
    """

    name: str
    """Name of the global tensor."""
    shape: tuple[int, ...]
    """Shape of the global tensor."""
    offset: tuple[int, ...]
    """Index of the rectangle's first element in the global tensor, one number per axis."""
    data: torch.Tensor
    """The rectangle's values: a contiguous view of the weights or optimizer states that training uses.

    It has as many axes as the global tensor.
    """
    padded: bool
    """True if zeros pad the global tensor to a shape that depends on the parallel layout."""


class _Shard(NamedTuple):
    """Part of this rank's parameter (or buffer) that is one rectangle of a global tensor.

    A global tensor is the parameter as it would be without parallelism.

    parameter: everything that this rank has of the parameter, of which the shard is a part.
    place: Megatron's description of the rectangle: name, shape and offset in the global tensor.
    """

    parameter: torch.Tensor
    place: ShardedTensor

    @property
    def expert(self) -> bool:
        return not getattr(self.parameter, "allreduce", True)

    @property
    def start(self) -> int:
        """Index of the shard's first element in the flattened parameter.

        Raises RuntimeError if the shard is not a contiguous part of the parameter.
        """
        part, whole = self.place.data, self.parameter
        if (
            not part.is_contiguous()
            or part.untyped_storage().data_ptr() != whole.untyped_storage().data_ptr()
        ):
            raise RuntimeError(f"{self.place.key}: the shard is not a contiguous part of the parameter")
        return part.storage_offset() - whole.storage_offset()


def rectangles(
    start: int, stop: int, shape: tuple[int, ...]
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Divide the range [start, stop) of a tensor's elements into rectangles, as few as possible.

    start, stop: indices in the flattened tensor (row-major order).
    shape: shape of the tensor.

    Yields (offset, size) of each rectangle, in row-major order, each with one number per axis.
    """
    if start >= stop:
        return
    if not shape:
        yield (), ()
        return
    row = math.prod(shape[1:])
    first, head = divmod(start, row)
    last, tail = divmod(stop, row)
    if head and first == last:
        yield from _within_row(first, head, tail, shape)
        return
    if head:
        yield from _within_row(first, head, row, shape)
        first += 1
    if first < last:
        yield (first, *(0 for _ in shape[1:])), (last - first, *shape[1:])
    if tail:
        yield from _within_row(last, 0, tail, shape)


def _within_row(row: int, start: int, stop: int, shape: tuple[int, ...]):
    for offset, size in rectangles(start, stop, shape[1:]):
        yield (row, *offset), (1, *size)


def sharded_model(chunks) -> tuple[list[_Shard], list[dict[str, ShardedObject]]]:
    """Return (shards, objects): all parts of this rank's model that Megatron would put in a checkpoint.

    shards: parts of all parameters and buffers. Each is a rectangle of a global tensor.
    objects: for each model chunk, {name within the chunk: object} of everything that is not a tensor.
    """
    metadata = {
        "dp_cp_group": mpu.get_data_parallel_group(with_context_parallel=True),
        "singleton_local_shards": False,
    }
    shards, objects = [], []
    for chunk in chunks:
        objects.append({})
        for name, entry in chunk.sharded_state_dict(metadata=metadata).items():
            if isinstance(entry, ShardedObject):
                objects[-1][name] = entry
                continue
            # For example gate and up projection: one parameter here, two halves of the global tensor.
            built = entry.build() if isinstance(entry, ShardedTensorFactory) else [entry]
            shards += [_Shard(entry.data, place) for place in nested_values(built)]
    return shards, objects


def _own_shares(shards: list[_Shard]) -> dict[int, range]:
    """Return which elements of each parameter this rank writes to a checkpoint.

    Data-parallel replicas hold equal parameters, so each replica writes an equal share of all elements.

    Returns {id(parameter): range of indices in the flattened parameter}. A parameter of which this rank
    writes nothing has an empty range, or is missing.
    """
    shares = {}
    for expert in (False, True):
        group = (
            mpu.get_expert_data_parallel_group()
            if expert
            else mpu.get_data_parallel_group(with_context_parallel=True)
        )
        # Megatron numbers copies by (pipeline stage, TP rank, replica). Only the copies on the first stage
        # and the first TP rank are written.
        mine = [shard for shard in shards if shard.expert == expert and not any(shard.place.replica_id[:-1])]
        if any(shard.place.replica_id[-1] != group.rank() for shard in mine):
            raise RuntimeError(
                "this version of Megatron is not supported: a parameter's replica_id must be its "
                "data-parallel rank; install megatron-core 0.16.1 or 0.19.2"
            )
        parameters = {id(shard.parameter): shard.parameter for shard in mine}
        total = sum(parameter.numel() for parameter in parameters.values())
        first, end = (total * (group.rank() + i) // group.size() for i in (0, 1))
        at = 0
        for key, parameter in parameters.items():
            shares[key] = range(max(first - at, 0), min(end - at, parameter.numel()))
            at += parameter.numel()
    return shares


def _pieces(
    prefix: str, shard: _Shard, values: torch.Tensor, first: int, wanted: range
) -> Iterator[Rectangle]:
    """Divide the wanted elements of a shard into rectangles of its global tensor.

    Each rectangle has at most 4 * 2 ** 20 elements (_MOST_ELEMENTS).

    prefix: prefix for the global tensor's name.
    values: flattened values of the parameter, or of one of its optimizer states.
    first: index, in the flattened parameter, of the first element of `values`.
    wanted: range of indices in the flattened parameter. Elements outside the shard are ignored.
    """
    place, begin = shard.place, shard.start
    start, stop = max(wanted.start, begin), min(wanted.stop, begin + place.data.numel())
    ahead, axes = place.prepend_axis_num, len(place.global_shape)
    for low in range(start, stop, _MOST_ELEMENTS):
        at = low - first
        for offset, size in rectangles(
            low - begin, min(low + _MOST_ELEMENTS, stop) - begin, place.local_shape
        ):
            count = math.prod(size)
            yield Rectangle(
                name=prefix + place.key,
                shape=tuple(place.global_shape),
                offset=tuple(a + b for a, b in zip(place.global_offset, (0,) * ahead + offset, strict=True)),
                data=values[at : at + count].view((1,) * (axes - len(size)) + size),
                padded=place.allow_shape_mismatch,
            )
            at += count


def _elements(shards: list[_Shard], writing: bool) -> dict[int, range]:
    """Return which elements of each parameter this rank writes to a checkpoint, or reads from one.

    Returns {id(parameter): range of indices in the flattened parameter}.

    writing: if True, return this rank's share of the elements, so that replicas together write each element
        once. If False, return all elements that the rank holds.
    """
    if writing:
        return _own_shares(shards)
    return {id(shard.parameter): range(shard.parameter.numel()) for shard in shards}


def weight_pieces(
    shards: list[_Shard],
    writing: bool,
    prefix: str = "",
    values_of: Callable[[torch.Tensor], torch.Tensor | None] = torch.Tensor.detach,
) -> list[Rectangle]:
    """Return the rectangular parts of weights that this rank must write to a checkpoint, or read from one.

    shards: the shards that `sharded_model` returns.
    writing: if True, return this rank's share of the elements, so that replicas together write each element
        once. If False, return all elements that the rank holds.
    prefix: prefix for the names of the weights in the checkpoint.
    values_of: function that takes a parameter and returns the contiguous values to save or to fill, such as
        the reference's. If it returns None, the parameter is left out. Default: the parameter's own values.
    """
    shares = _elements(shards, writing)
    pieces = []
    for shard in shards:
        values = values_of(shard.parameter) if id(shard.parameter) in shares else None
        if values is not None:
            pieces += _pieces(prefix, shard, values.view(-1), 0, shares[id(shard.parameter)])
    return pieces


def optimizer_pieces(shards: list[_Shard], optimizer, writing: bool) -> list[Rectangle]:
    """Return the parts of optimizer states that this rank must write to a checkpoint, or read from one.

    The states are Adam's moments, and fp32 master weights for parameters that are not fp32.

    shards: the shards that `sharded_model` returns.
    optimizer: Optimizer of the model.
    writing: if True, return this rank's share of the elements, so that replicas together write each element
        once. If False, return all elements that the rank holds.
    """
    shares = _elements(shards, writing)
    pieces = []
    for shard in shards:
        found = _optimizer_state(optimizer, shard.parameter)
        if found is None or id(shard.parameter) not in shares:
            continue
        first, own, states = found
        for name, values in states.items():
            wanted = shares[id(shard.parameter)] if own is None else own
            pieces += _pieces(f"optimizer.state.{name}.", shard, values, first, wanted)
    return pieces


def _optimizer_state(
    optimizer, parameter: torch.Tensor
) -> tuple[int, range | None, dict[str, torch.Tensor]] | None:
    """Return the optimizer states that this rank has of a parameter, or None if it has none.

    The result is (first, own, states):

    - first: index, in the flattened parameter, of the element with which the states begin.
    - own: range of elements whose states only this data-parallel replica has (distributed optimizer). None:
      every replica has the states of all elements.
    - states: {name of the state: flattened values}.
    """
    for part in optimizer.parts():
        own = None
        if hasattr(part, "model_param_group_index_map"):
            if parameter not in part.model_param_group_index_map:
                continue
            group, index = part.model_param_group_index_map[parameter]
            optimized = part.optimizer.param_groups[group]["params"][index]
            placed = part._get_model_param_range_map(parameter)["param"]
            own = range(placed.start, placed.end)
        else:
            optimized = getattr(parameter, "main_param", parameter)
            if optimized not in part.optimizer.state:
                continue
        state = part.optimizer.state[optimized]
        states = {name: state[name] for name in ("exp_avg", "exp_avg_sq")}
        if parameter.dtype != torch.float32:
            states["param"] = optimized
        return own.start if own else 0, own, {name: value.detach().view(-1) for name, value in states.items()}
    return None
