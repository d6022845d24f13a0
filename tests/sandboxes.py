"""Processes that the sandbox's tests start."""

import psutil


def processes() -> set[int]:
    """Return all descendants of this process."""
    return {process.pid for process in psutil.Process().children(recursive=True)}
