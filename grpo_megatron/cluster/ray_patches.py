"""Changes to Ray's internals, where Ray has no setting. For Ray 2.60.0, which requirements/ pins.

No other module of this package uses `ray._private`.
"""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from inspect import signature

import ray
from ray._private import ray_constants, services
from ray._raylet import (
    DASHBOARD_AGENT_LISTEN_PORT_NAME,
    METRICS_AGENT_PORT_NAME,
    METRICS_EXPORT_PORT_NAME,
    RUNTIME_ENV_AGENT_PORT_NAME,
    persist_port,
)

from grpo_megatron.cluster.ports import hold_port


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


# Agents are processes beside the raylet. For each parameter of start_raylet with a port of an agent, the name
# of the file in which the agent writes down its port.
_AGENT_PORTS = {
    "metrics_agent_port": METRICS_AGENT_PORT_NAME,
    "metrics_export_port": METRICS_EXPORT_PORT_NAME,
    "dashboard_agent_listen_port": DASHBOARD_AGENT_LISTEN_PORT_NAME,
    "runtime_env_agent_port": RUNTIME_ENV_AGENT_PORT_NAME,
}
# The port of the only agent that serves in a Ray without its dashboard's packages.
_NEEDED = "runtime_env_agent_port"
# Written down in place of a port at which nothing is served. No other process must be able to serve there
# either: Ray's processes would send it their token.
_NO_PORT = -1
# Sockets on the chosen ports, so that nothing else gets them before the agents do, which may share them.
_held = ExitStack()


@contextmanager
def choose_agent_ports() -> Iterator[None]:
    """Choose the ports of Ray's agents, and write them down, before Ray starts a raylet in the context.

    Otherwise the agents do this, and the raylet ends if it takes longer than 15 seconds, for which Ray has no
    setting (ray#65983). Agents import many modules, which takes longer on a loaded machine or from a slow
    file system.
    """
    start = services.start_raylet

    def start_with_ports(*arguments, **options):
        given = signature(start).bind(*arguments, **options)
        serves_all = ray._private.utils.get_dashboard_dependency_error() is None
        for name, file in _AGENT_PORTS.items():
            port = _NO_PORT
            if serves_all or name == _NEEDED:
                port = given.arguments[name] = given.arguments.get(name) or hold_port(_held)
            persist_port(given.arguments["session_dir"], given.arguments["node_id"], file, port)
        return start(*given.args, **given.kwargs)

    services.start_raylet = start_with_ports
    try:
        yield
    finally:
        services.start_raylet = start


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
