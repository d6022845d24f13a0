"""Processes that tests of the sandbox start."""

import psutil


def processes() -> set[int]:
    """All that descend from this one."""
    return {process.pid for process in psutil.Process().children(recursive=True)}
