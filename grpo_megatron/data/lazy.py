"""Lazy sequences: an item is made each time it is requested."""

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from types import MappingProxyType
from typing import TypeVar

T = TypeVar("T")


class LazySequence(Sequence[T]):
    """A sequence that makes an item each time it is requested, so that the items need no memory.

    indices: an integer for each item, such as the index of the item's record in its data source.
    make: function that takes this integer and returns the item.
    contents: {name of a data source: digest of its records}, for the items' data sources. Checkpoints store
        these digests, so that a resumed run can tell whether the data has changed.
    """

    def __init__(
        self,
        indices: Sequence[int],
        make: Callable[[int], T],
        contents: Mapping[str, str] = MappingProxyType({}),
    ):
        self._indices, self._make, self.contents = indices, make, contents

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, index: int) -> T:
        return self._make(self._indices[index])


def contents_of(items: Sequence) -> dict[str, str]:
    """Return {name of a data source: digest of its records} for the data from which a sequence was loaded.

    A resumed run compares the digests to tell whether the data has changed. The result is empty if `items`
    has no attribute `contents`, like a plain list.
    """
    return dict(getattr(items, "contents", {}))


class ConcatSequence(Sequence[T]):
    """Several sequences as one: the items of the first part, then those of the second, and so on.

    The attribute `contents`, {name of a data source: digest of its records}, covers the sources of all parts.
    """

    def __init__(self, parts: Sequence[Sequence[T]]):
        self._parts = parts
        self.contents = {source: digest for part in parts for source, digest in contents_of(part).items()}
        self._starts = [0, *accumulate(map(len, parts))]

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, index: int) -> T:
        index = range(len(self))[index]
        part = bisect_right(self._starts, index) - 1
        return self._parts[part][index - self._starts[part]]
