"""Common parts of the tools for checkpoints, as programs."""

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
        help="that share the work (default: the cores, at most 8)",
    )


def call(parser: argparse.ArgumentParser, work: Callable[[], int | None], continues: bool = False) -> None:
    """Call `work` and exit with its status, or with 2 and a message for a UserError.

    continues: the same command would continue after an interruption, which the message then says.
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
