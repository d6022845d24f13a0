"""Text for the user: log messages on stdout, above the progress bar, and tables."""

import logging
import sys
from collections.abc import Sequence
from contextlib import suppress

from tqdm import tqdm


class _Terminal(logging.Handler):
    """Logging handler that prints messages on stdout, without time and level, and ignores OSErrors there."""

    def emit(self, record: logging.LogRecord) -> None:
        with suppress(OSError):
            # tqdm.write keeps a progress bar below the line.
            tqdm.write(self.format(record), file=sys.stdout)
            sys.stdout.flush()


_TERMINAL = _Terminal()


def show_messages() -> None:
    """Show the log messages of this package on stdout, from level INFO on. The command line calls this."""
    package = logging.getLogger("grpo_megatron")
    package.setLevel(logging.INFO)
    package.propagate = False  # libraries may add handlers to the root logger, which would show them again
    package.addHandler(_TERMINAL)


class Rarely:
    """Callable object that logs a warning only at its 1st, 2nd, 4th, 8th call and so on.

    All calls of one object are counted together, whatever their texts are. From the second on, a logged
    warning says how many calls there have been.
    """

    def __init__(self, logger: logging.Logger, once: bool = False):
        """Create an object that logs warnings to `logger`.

        once: If True, log only the first call.
        """
        self._logger, self._once, self._count = logger, once, 0

    def __call__(self, text: str) -> None:
        self._count += 1
        if self._count == 1 or (not self._once and self._count & (self._count - 1) == 0):
            often = f" ({self._count} times so far; most repeats are not shown)" if self._count > 1 else ""
            self._logger.warning(text + often)


def table_text(rows: Sequence[Sequence[str]]) -> str:
    """Format rows as a text table. The first column is aligned to the left, all others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for first, *others in rows:
        cells = [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
        lines.append("  ".join([first.ljust(widths[0]), *cells]).rstrip())
    return "\n".join(lines)
