"""What the tools around checkpoints have in common as programs."""

import argparse
import signal
import warnings
from collections.abc import Callable

from grpo_megatron.conversion.pool import default_processes
from grpo_megatron.errors import UserError

_INTERRUPTED = 130  # as shells report it


def add_processes(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--processes",
        type=int,
        default=default_processes(),
        help="that share the work (default: the cores, at most 8)",
    )


def call(parser: argparse.ArgumentParser, work: Callable[[], int | None], continues: bool = False) -> None:
    """Do the work and end with its exit status; 2 and a message for a UserError. continues: a second call goes on after an interruption."""
    warnings.filterwarnings("ignore", message=".*(Transformer Engine|Apex|image Python extension).*")
    before = signal.signal(
        signal.SIGTERM, signal.default_int_handler
    )  # so that other processes are ended on the way out
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
