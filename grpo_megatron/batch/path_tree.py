"""The tree of a trajectory's sequences: what several sequences begin with is one node."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

# Two texts that the model read become one node with two branches if they begin with this many equal tokens.
# Shorter beginnings are mostly the header of a message, which says nothing.
_LEAST_SHARED = 64


@dataclass(frozen=True)
class TokenPath:
    """One sequence of a trajectory, as a path from the root of its tree.

    ids: int [n], token ids of prompt and response
    written: bool [n], True for tokens that the model wrote
    num_prompt: number of tokens that the model read before its first turn in this sequence
    """

    ids: np.ndarray
    written: np.ndarray
    num_prompt: int


@dataclass(eq=False)
class PathNode:
    """A node of the tree: tokens that follow those of its parent, all read or all written by the model."""

    path: int
    """Index of the sequence that the tokens are taken from: the first one that contains the node."""
    start: int
    """Index of the node's first token in that sequence."""
    end: int
    """Index after the node's last token. It is the number of tokens from the root to the node's end."""
    is_written: bool
    """True if the model wrote the tokens, False if it read them."""
    children: "list[PathNode]" = field(default_factory=list)
    """Nodes that follow this one, in the order of the sequences."""


@dataclass(frozen=True)
class Listed:
    """A node at its place in the list of all nodes of a tree, depth first.

    node: the node
    parent: place of its parent; None: the node is the first of its path
    depth: number of branchings before the node
    """

    node: PathNode
    parent: int | None
    depth: int


def path_tree(paths: Sequence[TokenPath]) -> list[Listed]:
    """Return the nodes of a tree of sequences, depth first. What several sequences begin with is one node.

    A sequence is attached to the deepest node whose tokens, from the root on, it read before its first turn.
    A text that the model read is split where the sequences part. A turn of the model is never split.
    """
    root = PathNode(0, 0, 0, False)
    for index, path in enumerate(paths):
        # Its own turns are new, even if another turn has the same tokens.
        node = _deepest(root, paths, path.ids[: _first_written(path)])
        node = _shared(node, paths, path) or node
        for start, end in _segments(path, node.end):
            child = PathNode(index, start, end, bool(path.written[start]))
            node.children.append(child)
            node = child
    return list(_listed(root))


def _deepest(root: PathNode, paths: Sequence[TokenPath], ids: np.ndarray) -> PathNode:
    """Return the deepest node whose tokens, from the root on, `ids` begins with."""
    found, waiting = root, [root]
    while waiting:
        node = waiting.pop()
        found = max(found, node, key=lambda one: one.end)
        waiting += [
            child
            for child in node.children
            if np.array_equal(ids[child.start : child.end], paths[child.path].ids[child.start : child.end])
        ]
    return found


def _shared(node: PathNode, paths: Sequence[TokenPath], path: TokenPath) -> PathNode | None:
    """Split the child of a node that a sequence shares a beginning with, and return the shared part.

    Return None if no child that the model read shares at least _LEAST_SHARED tokens with the sequence.

    node: the deepest node that the sequence begins with.
    """
    read = path.ids[node.end : max(node.end, _first_written(path))]
    for index, child in enumerate(node.children):
        size = min(len(read), child.end - child.start)
        theirs = paths[child.path].ids[child.start : child.start + size]
        equal = _run(read[:size] == theirs) if size and read[0] == theirs[0] else 0
        if not child.is_written and equal >= _LEAST_SHARED:
            middle = child.start + equal
            rest = PathNode(child.path, middle, child.end, False, child.children)
            node.children[index] = PathNode(child.path, child.start, middle, False, [rest])
            return node.children[index]
    return None


def _first_written(path: TokenPath) -> int:
    """Return the index of the first token that the model wrote in this sequence."""
    written = np.flatnonzero(path.written)
    return int(written[0]) if len(written) else len(path.ids)


def _run(values: np.ndarray) -> int:
    """Return the number of leading values that equal the first one. values: bool [n]."""
    changes = np.flatnonzero(values != values[:1])
    return int(changes[0]) if len(changes) else len(values)


def _segments(path: TokenPath, first: int) -> Iterator[tuple[int, int]]:
    """Yield (start, end) of the prompt, of each turn, and of each text between turns, from a token on.

    first: index of the first token that is not in the tree yet.
    """
    changes = np.flatnonzero(path.written[1:] != path.written[:-1]) + 1
    edges = sorted({first, len(path.ids), *changes[changes > first].tolist(), max(first, path.num_prompt)})
    yield from pairwise(edges)


def _listed(root: PathNode) -> Iterator[Listed]:
    """Yield all nodes below the root, depth first, with their places."""
    waiting: list[Listed] = [Listed(child, None, len(root.children) > 1) for child in root.children[::-1]]
    place = 0
    while waiting:
        one = waiting.pop()
        yield one
        depth = one.depth + (len(one.node.children) > 1)
        waiting += [Listed(child, place, depth) for child in one.node.children[::-1]]
        place += 1
