"""Sections about untrusted programs: the sandbox that runs them, and the reward `code`."""

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
        "Maximum time, without waits for a processor.",
        "seconds",
        ge=0.01,  # a shorter program may end before the time is checked
        le=LONGEST_WAIT,
    )
    cpu_seconds: int = option(6, "Processor time.", "seconds", gt=0, le=LONGEST_WAIT)
    memory_mib: int = option(1024, "Address space, including 30 MiB of Python.", "MiB", ge=64)
    threads: int = option(32, "Number of threads.", gt=0)
    files_mib: int = option(16, "Data written into the program's folder.", "MiB", gt=0)
    files: int = option(64, "Files and folders that the program makes.", gt=0)
    output_kib: int = option(1024, "Data written to stdout, and as much to stderr.", "KiB", gt=0)


@dataclass
class CodeConfig:
    isolation: Isolation = option(
        Isolation.full,
        "Minimum isolation of programs. full: no network, no files outside the program's folder. no_network: "
        "no network, but all files that the run can access.",
    )
    find: CodePlace = option(
        CodePlace.last_block,
        "Place of the program: the last_block or first_block between ``` lines, or the whole response.",
    )
    preamble: str = option("", "Text put before each program, such as imports that the task assumes.")
    score: CodeScore = option(
        CodeScore.all,
        "Reward of a program. all: 1 if all tests pass, else 0. share: the share of passed tests.",
    )
    limits: SandboxLimits = section(SandboxLimits, "Limits of each program, for each of its tests.")
