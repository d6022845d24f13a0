"""Changes to Ray's internals, where Ray has no setting. For Ray 2.60.0, which requirements/ pins.

No other module of this package uses `ray._private`.
"""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import ray
from ray._private import ray_constants, services


def listen_on_loopback_only() -> None:
    """Make Ray clusters that this process starts listen on loopback, where no other machine can connect."""
    ray_constants.ENABLE_RAY_CLUSTER = False


def log_messages() -> None:
    """Write Ray's messages to the driver's log instead of the terminal.

    The messages are long texts about dead processes. The run reports these deaths itself.
    """
    ray._private.worker.print_to_stdstream = _into_the_log


def _into_the_log(data: dict, ignore_prefix: bool) -> None:
    # If the run has a keeper (commands.keeper), descriptor 2 is the log. sys.stderr may be a terminal.
    os.write(2, "".join(f"(ray) {line}\n" for line in data["lines"]).encode("utf-8", "backslashreplace"))


@contextmanager
def keep_signal_handlers() -> Iterator[None]:
    """Keep this process's SIGTERM handler when ray.init is called in the context.

    ray.init would replace the handler, at several places in Python and also in C++. The scheduler's request
    to stop the run (SIGTERM) would then be lost, or would end the process by SIGABRT.
    """
    utils, handler = ray._private.utils, signal.getsignal(signal.SIGTERM)
    setting = utils.set_sigterm_handler
    utils.set_sigterm_handler = lambda handler: None
    try:
        yield
    finally:
        utils.set_sigterm_handler = setting
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)


@contextmanager
def wait_for_raylet(seconds: float, is_alive: Callable[[], bool]) -> Iterator[None]:
    """Make ray.init, called in the context, wait up to `seconds` for the raylet that it starts.

    In the context, Ray's function get_node is replaced, because its shorter time limit cannot be configured.

    is_alive: returns True if the raylet still runs. If it has ended, ray.init fails at once.
    """
    ask, until = services.get_node, time.monotonic() + seconds

    def ask_again(*arguments):
        while True:
            try:
                return ask(*arguments)
            except RuntimeError:  # the node is not known yet
                if time.monotonic() > until or not is_alive():
                    raise
            time.sleep(0.1)

    services.get_node = ask_again
    try:
        yield
    finally:
        services.get_node = ask
