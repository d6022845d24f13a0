"""Division of a conversion into units of work. A unit is one output file.

There are enough files to occupy several processes and to continue after an interruption, but not too many.
"""

from collections.abc import Iterable
from typing import TypeVar

Item = TypeVar("Item")

# Largest part of a tensor that a process holds in memory.
BUCKET_BYTES = 64 * 2**20
_LEAST, _MOST = 256 * 2**20, 4 * 2**30
_ABOUT = 32  # number of files to aim at, within these bounds of their size


def file_bytes(total: int) -> int:
    """Return the size of a file, in bytes, for a checkpoint of `total` bytes.

    A tensor that is larger and not cut gets a file of its own.
    """
    return min(max(total // _ABOUT, _LEAST), _MOST)


def filled(items: Iterable[tuple[Item, int]], limit: int) -> list[tuple[list[Item], int]]:
    """Group (item, bytes) in order into [(items, their bytes)].

    Each group has at most `limit` bytes, or a single item.
    """
    found: list[tuple[list[Item], int]] = []
    for item, size in items:
        if found and found[-1][1] + size <= limit:
            found[-1][0].append(item)
            found[-1] = (found[-1][0], found[-1][1] + size)
        else:
            found.append(([item], size))
    return found
