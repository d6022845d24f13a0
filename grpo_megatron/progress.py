"""That this process moves on, said by what knows nothing of its heart: files are read and written far below it.

A rank that reads a large file from a slow disk is found in the same call for `read` nearly every time that it is looked at, and was
taken for one that hangs.
"""

_moves = 0


def moved() -> None:
    """Some megabytes are read or written, or a piece of a tensor. From any thread."""
    global _moves
    _moves += 1  # two threads may count as one: nobody needs more than that it changes


def moves() -> int:
    """Another number than before: the process has moved on since then."""
    return _moves
