"""Units of work: one output file each, neither too many nor too few for several processes and for continuing."""

from collections.abc import Iterable
from typing import TypeVar

Item = TypeVar("Item")

# What a process holds of a tensor at a time.
BUCKET_BYTES = 64 * 2**20
_LEAST, _MOST = 256 * 2**20, 4 * 2**30
_ABOUT = 32  # so many files, within these bounds


def file_bytes(total: int) -> int:
    """How large a file of a checkpoint of `total` bytes becomes; a larger tensor that is not cut gets a file of its own."""
    return min(max(total // _ABOUT, _LEAST), _MOST)


def filled(items: Iterable[tuple[Item, int]], limit: int) -> list[tuple[list[Item], int]]:
    """[(items, their bytes)] of (item, bytes) in this order, each of at most `limit` bytes or one item."""
    found: list[tuple[list[Item], int]] = []
    for item, size in items:
        if found and found[-1][1] + size <= limit:
            found[-1][0].append(item)
            found[-1] = (found[-1][0], found[-1][1] + size)
        else:
            found.append(([item], size))
    return found
