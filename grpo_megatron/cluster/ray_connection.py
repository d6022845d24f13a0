"""Connecting this process to Ray: it joins a Ray cluster, or starts one here and ends it again.

A few things differ from Ray's defaults: how long it waits, which signal handlers it installs, where its files
are, and who may connect to it.
"""

import contextlib
import os
import secrets
import signal
import threading
import time
from pathlib import Path

import psutil
import ray
from ray._private import ray_constants, services

from grpo_megatron.cluster.joining import own_folder, refusals_said
from grpo_megatron.run.guard import Guard

# Importing Python modules takes minutes if they are on a slow file system or many processes share the
# processors.
START_SECONDS = 300
# Settings of a Ray cluster that is started here, unless the environment has others. slurm/train.sbatch has
# them, too.
_SETTINGS = {
    # With Ray's default of 15, processes of the very lowest priority, such as the sandbox's helpers, still
    # take a third of the engines' CPU time.
    "RAY_worker_niceness": "0",
    # Ray would start a Python process for each processor. None of our work ever goes to them, because all our
    # actors have environments of their own. Where these processes were slow to start, ray.init did not
    # return.
    "RAY_prestart_worker_first_driver": "0",
    # Ray's defaults are half a minute or a minute.
    "RAY_gcs_server_port_wait_time_s": f"{START_SECONDS}",
    "RAY_raylet_start_wait_time_s": f"{START_SECONDS}",
    "RAY_agent_register_timeout_ms": f"{START_SECONDS * 1000}",
    "RAY_worker_register_timeout_seconds": f"{START_SECONDS}",
}
# Variables by which the user may have configured Ray's token. Without RAY_AUTH_MODE, a Ray cluster that is
# started here asks for a token.
_ASKED_FOR = {"RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"}


def connect(address: str | None, num_slots: int) -> Path | None:
    """Join a Ray cluster, or start one on this machine. All signal handlers stay as they are.

    address: HOST:PORT of the cluster to join; None: start one.
    num_slots: number of devices that the run needs. A cluster that is started gets at least as many CPUs.

    Returns the folder of Ray's files if a cluster was started. Returns None if one was joined, or if this
    process is connected already. Raises UserError if nothing answers at the address, if the cluster refuses
    this process, or if the folder of Ray's files cannot be created.
    """
    if ray.is_initialized():
        return None
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    common = {"log_to_driver": False, "logging_level": "error", "include_dashboard": False}
    folder = None
    if not address:
        folder = own_folder()
        common["_temp_dir"] = str(folder / "r")
        # Processes share the machine's cores, so Ray counts slots here, not cores.
        common["num_cpus"] = max(num_slots, os.cpu_count() or 1)
        for variable, value in _SETTINGS.items():
            os.environ.setdefault(variable, value)
        # This makes Ray listen on loopback only. No other machine needs to reach a Ray cluster that is
        # started here.
        ray_constants.ENABLE_RAY_CLUSTER = False
        # Other users of the machine can reach its loopback, so Ray asks for a token. Ray itself would write
        # one into ~/.ray/auth_token, which everybody who may enter that home can read, and which fails if it
        # cannot be written. The processes that Ray starts inherit this one.
        if not _ASKED_FOR & os.environ.keys():
            os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    else:
        del common["include_dashboard"]
    ray._private.worker.print_to_stdstream = _into_the_log  # Ray has no setting for this
    try:
        with _handlers_stay(), _raylet_has_time(), refusals_said(address):
            ray.init(address=address or "local", **common)
    except BaseException:
        if folder:
            with contextlib.suppress(OSError):  # fails if it has logs, which may tell why
                folder.rmdir()
        raise
    return folder


def _into_the_log(data: dict, ignore_prefix: bool) -> None:
    """Write Ray's messages to the driver's log. Replaces Ray's print_to_stdstream, which prints them.

    They are long texts about dead processes, whose death the run reports itself. If the run has a keeper,
    descriptor 2 is the log. sys.stderr may still be a terminal.
    """
    os.write(2, "".join(f"(ray) {line}\n" for line in data["lines"]).encode("utf-8", "backslashreplace"))


@contextlib.contextmanager
def _handlers_stay():
    """Keep this process's SIGTERM handler while ray.init runs in the context.

    ray.init would replace it, in Python at several moments and also in C++. A request to stop the run would
    then be lost, or end the process by SIGABRT.
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


@contextlib.contextmanager
def _raylet_has_time():
    """Let ray.init, called in the context, wait up to START_SECONDS for the node that it starts.

    Replaces Ray's function get_node, whose shorter time limit cannot be configured.
    """
    ask, until = services.get_node, time.monotonic() + START_SECONDS

    def ask_again(*arguments):
        while True:
            try:
                return ask(*arguments)
            except RuntimeError:  # the node is not known yet
                if time.monotonic() > until or not _raylet_runs():
                    raise
            time.sleep(0.1)

    services.get_node = ask_again
    try:
        yield
    finally:
        services.get_node = ask


def end_ray(guard: Guard) -> None:
    """End the Ray cluster that this process has started.

    guard: stops watching Ray's daemons first, so that it does not take their end for a failure.
    """
    guard.needs(None)
    ray.shutdown()


def daemons() -> list[psutil.Process]:
    """Return Ray's daemons (raylet and GCS) of the cluster that this process has started or is starting.

    The guard watches them, because no run can go on without them.
    """
    found = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):  # ray.init starts many short-lived processes
            if child.name() in ("raylet", "gcs_server"):
                found.append(child)
    return found


def _raylet_runs() -> bool:
    """Return True if the raylet that this process has started still runs, so that waiting makes sense."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return any(
            daemon.name() == "raylet" and daemon.status() != psutil.STATUS_ZOMBIE for daemon in daemons()
        )
    return False
