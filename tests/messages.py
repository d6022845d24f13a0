"""Messages for the user that a test asks about."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def logged() -> Iterator[list[str]]:
    """Yield a list to which the messages that this package logs within the context are added."""
    package, found = logging.getLogger("grpo_megatron"), []
    handler, level = logging.Handler(), package.level
    handler.emit = lambda record: found.append(record.getMessage())
    package.setLevel(logging.INFO)
    package.addHandler(handler)
    try:
        yield found
    finally:
        package.removeHandler(handler)
        package.setLevel(level)
