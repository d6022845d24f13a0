"""Common parts of the command lines of the programs in tools/ that convert or show checkpoints."""

import argparse
import signal
import warnings
from collections.abc import Callable

from grpo_megatron.conversion.pool import default_processes
from grpo_megatron.errors import UserError

_INTERRUPTED = 130  # exit status of an interrupted program in a shell


def add_processes(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--processes",
        type=int,
        default=default_processes(),
        help="number of processes that share the work (default: the cores, at most 8)",
    )


def call(parser: argparse.ArgumentParser, work: Callable[[], int | None], continues: bool = False) -> None:
    """Run the work of a command-line program, and exit this process. This function never returns.

    The exit status is what `work` returns (None: 0), 2 after a UserError, or 130 after SIGINT or SIGTERM. A
    UserError or an interruption is shown as one line. Any other exception is raised.

    parser: parser of the program's arguments, which prints the message and exits.
    work: the whole work of the program.
    continues: True if the same command, started again, continues the interrupted work. The message says so.
    """
    warnings.filterwarnings("ignore", message=".*(Transformer Engine|Apex|image Python extension).*")
    # SIGTERM raises KeyboardInterrupt, so that other processes are ended on the way out.
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        status = work() or 0
    except UserError as error:
        parser.exit(2, f"error: {error}\n")
    except KeyboardInterrupt:
        parser.exit(
            _INTERRUPTED,
            f"interrupted{'; the same command continues where it stopped' if continues else ''}\n",
        )
    finally:
        signal.signal(signal.SIGTERM, before)
    parser.exit(status)
