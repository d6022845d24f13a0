"""Division of a checkpoint conversion into units of work for the worker processes.

In a conversion, a unit is one output file. In a listing or comparison, it is a list of tensors of about the
same size. There are enough units to occupy several processes and to continue after an interruption, but not
too many.
"""

from collections.abc import Iterable
from typing import TypeVar

Item = TypeVar("Item")

# Largest part of a tensor that a process holds in memory.
BUCKET_BYTES = 64 * 2**20
_LEAST, _MOST = 256 * 2**20, 4 * 2**30
_ABOUT = 32  # number of files to aim at, within these bounds of their size


def file_bytes(total: int) -> int:
    """Return the maximum size in bytes of an output file, for a checkpoint of `total` bytes.

    The maximum is a 32nd of the total, but at least 256 MiB and at most 4 GiB. A larger tensor that is not
    split gets a file of its own.
    """
    return min(max(total // _ABOUT, _LEAST), _MOST)


def filled(items: Iterable[tuple[Item, int]], limit: int) -> list[tuple[list[Item], int]]:
    """Group items, without changing their order, into units of work of at most `limit` bytes each.

    Return [(items of the unit, sum of their bytes)]. An item larger than `limit` is a unit by itself.

    items: pairs (item, bytes of the item).
    """
    found: list[tuple[list[Item], int]] = []
    for item, size in items:
        if found and found[-1][1] + size <= limit:
            found[-1][0].append(item)
            found[-1] = (found[-1][0], found[-1][1] + size)
        else:
            found.append(([item], size))
    return found
