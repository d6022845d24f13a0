"""A progress counter that low-level I/O increments, so that the heartbeat does not report slow I/O as a hang.

To notice a hang, the heartbeat checks whether the stack of its process changes. While a rank reads a large
file from a slow disk, its stack is nearly always in the same call of `read`, although it makes progress.
"""

_moves = 0


def moved() -> None:
    """Increment the progress counter, so that slow I/O is not reported as a hang. Any thread may call this.

    I/O loops call this function after every few megabytes read or written.
    """
    global _moves
    _moves += 1  # two threads may count as one; all that matters is that the value changes


def moves() -> int:
    """Return the counter that `moved` increments. If it has changed since a heartbeat, I/O makes progress."""
    return _moves
