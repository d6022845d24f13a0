"""Sections about untrusted programs: the sandbox that contains them, and the reward `code`."""

from enum import Enum

from grpo_megatron.config.options import LONGEST_WAIT, dataclass, option, section


class Isolation(str, Enum):
    full = "full"
    no_network = "no_network"


class CodeScore(str, Enum):
    all = "all"
    share = "share"


class CodePlace(str, Enum):
    last_block = "last_block"
    first_block = "first_block"
    whole = "whole"


@dataclass
class SandboxLimits:
    seconds: float = option(
        10.0,
        "longest time of one program; while it waits for a processor, it does not count",
        "seconds",
        ge=0.01,  # a shorter program may end before the time is checked
        le=LONGEST_WAIT,
    )
    cpu_seconds: int = option(6, "processor time of one program", "seconds", gt=0, le=LONGEST_WAIT)
    memory_mib: int = option(1024, "address space of one program, with Python's own 30 MiB", "MiB", ge=64)
    threads: int = option(32, "threads of one program; it can never start another process", gt=0)
    files_mib: int = option(16, "what one program may write into its folder", "MiB", gt=0)
    files: int = option(64, "files and folders that one program may make", gt=0)
    output_kib: int = option(1024, "what one program may write to stdout, and to stderr", "KiB", gt=0)


@dataclass
class CodeConfig:
    isolation: Isolation = option(
        Isolation.full,
        "what a machine must be able to keep programs from, or the run is refused: full (the network, and "
        "files outside of their folder), or no_network (programs read and write what the run can). More is "
        "kept from them wherever it can be",
    )
    find: CodePlace = option(
        CodePlace.last_block,
        "where the program is in a response: last_block or first_block (between ``` lines), whole",
    )
    preamble: str = option("", "put before each program, such as the imports that its task takes for granted")
    score: CodeScore = option(
        CodeScore.all, "the reward: all (1 if all tests pass, else 0), or share (that of passed tests)"
    )
    limits: SandboxLimits = section(SandboxLimits, "of each program, for each of its tests")
