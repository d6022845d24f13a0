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
        "Maximum time that one program may run. Time in which it waits for a processor does not count.",
        "seconds",
        ge=0.01,  # a shorter program may end before the time is checked
        le=LONGEST_WAIT,
    )
    cpu_seconds: int = option(6, "Processor time that one program may use.", "seconds", gt=0, le=LONGEST_WAIT)
    memory_mib: int = option(
        1024, "Address space of one program, including the 30 MiB of Python itself.", "MiB", ge=64
    )
    threads: int = option(32, "Number of threads of one program. No program can start another process.", gt=0)
    files_mib: int = option(16, "Data that one program may write into its folder.", "MiB", gt=0)
    files: int = option(64, "Number of files and folders that one program may make.", gt=0)
    output_kib: int = option(
        1024, "Data that one program may write to stdout, and as much to stderr.", "KiB", gt=0
    )


@dataclass
class CodeConfig:
    isolation: Isolation = option(
        Isolation.full,
        "Isolation that the machine must be able to enforce on programs; otherwise the run is refused. full: "
        "no network, and no files outside of the program's folder. no_network: no network, but programs can "
        "read and write all files that the run can. A machine that can enforce more does so.",
    )
    find: CodePlace = option(
        CodePlace.last_block,
        "Place of the program in a response. last_block, first_block: the last or first block between ``` "
        "lines. whole: the whole response.",
    )
    preamble: str = option(
        "", "Text that is put before each program, such as imports that the task takes for granted."
    )
    score: CodeScore = option(
        CodeScore.all,
        "How passed tests become the reward. all: 1 if all tests pass, else 0. share: the share of passed "
        "tests.",
    )
    limits: SandboxLimits = section(SandboxLimits, "Limits of each program, for each of its tests.")
