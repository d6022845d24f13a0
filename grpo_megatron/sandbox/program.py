"""Programs and commands for a sandbox, and their outcomes."""

from dataclasses import dataclass, field
from enum import Enum
from typing import Any


class Ended(str, Enum):
    """The reason why a program ended: `itself` if it ended by itself, else the limit that it exceeded.

    The limits are defined in config.sandbox.SandboxLimits, except `processes`, which is Program.processes.
    """

    itself = "itself"
    time = "time"
    cpu = "cpu"
    memory = "memory"
    threads = "threads"
    processes = "processes"
    files = "files"
    output = "output"


@dataclass(frozen=True)
class Program:
    """A program to run in a sandbox, with its input, and optionally with tests or a function to call.

    Tests run in a separate process, which exchanges only plain data with the program, such as numbers,
    strings and lists. So the program sees only the arguments of the tests' calls, and cannot return objects
    that pretend to be something else.
    """

    source: str
    """Source code of the program."""
    stdin: str = ""
    """Text that the program can read from stdin."""
    files: dict[str, str] = field(default_factory=dict)
    """{path in the program's working directory: contents} of files that exist when the program starts."""
    function: str | None = None
    """Name of the function to call (with `arguments`), or of the function under test (with `tests`)."""
    arguments: list | None = None
    """Arguments of `function`, as plain data. The return value of `function` becomes Outcome.result."""
    tests: str | None = None
    """Source code of the tests. The tests can use the program's functions as global names."""
    processes: int = 1
    """Maximum number of processes of the program. All other limits hold for each of the processes."""


@dataclass(frozen=True)
class ShellCommand:
    """A shell command to run in a sandbox, as a user's program that starts processes and calls a server.

    It gets a folder of its own, which is its working directory. Of its output, only the end is kept.
    """

    command: str
    """What /bin/sh executes."""
    stdin: str
    """Text that the command can read from stdin."""
    environment: dict[str, str]
    """Environment variables. HOME is the command's folder if it is not among them, and TMPDIR always is."""
    links: dict[str, str]
    """{name in its folder: absolute path} of files and folders that it may read there."""
    port: int
    """The port of this machine's loopback that it may connect to, by TCP."""
    processes: int
    """Maximum number of its processes. All other limits hold for each of them."""


class CommandStopped(Exception):
    """A command was ended because its caller wanted it."""


@dataclass(frozen=True)
class Outcome:
    """The outcome of running a Program: how it ended, and what it wrote and returned."""

    ended: Ended
    """Reason why the program ended."""
    status: int
    """Exit status of the tests, or of the program if there are none. -N if signal N ended the process."""
    stdout: str
    """Text that the program wrote to stdout, up to the limit, followed by that of the tests, if any."""
    stderr: str
    """Text that the program wrote to stderr, up to the limit, followed by that of the tests, if any."""
    seconds: float
    """Wall-clock seconds of the run, including the start of the program's process."""
    has_result: bool = False
    """True if Program.function was called and returned plain data."""
    result: Any = None
    """Return value of Program.function; None if `has_result` is False."""

    @property
    def succeeded(self) -> bool:
        """True if the run ended by itself with status 0.

        If there are tests, they have passed. The status is that of the tests' process, so the program cannot
        fake success by exiting early. Without tests, a program that exits early with status 0 counts as a
        success.
        """
        return self.ended == Ended.itself and self.status == 0
