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
    """Call `work` and exit with the status that it returns (None: 0), or with 2 after a UserError.

    parser: prints the message of the error.
    work: the whole work of the program.
    continues: True if the same command continues after an interruption. A message then tells the user.
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
