"""Connection of this process to Ray. The process joins a Ray cluster, or starts one and ends it again.

A few things differ from Ray's defaults: how long Ray waits, which signal handlers it installs, where its
files are, and who may connect to it.
"""

import contextlib
import os
import secrets
from collections.abc import Callable
from functools import cache
from pathlib import Path

import psutil
import ray

from grpo_megatron.cluster import ray_patches
from grpo_megatron.cluster.joining import own_folder, refusals_said

# Importing Python modules takes minutes if they are on a slow file system or many processes share the
# processors.
START_SECONDS = 300
# Settings of a Ray cluster that is started here. Environment variables of the user take precedence.
# slurm/train.sbatch has the same settings.
_SETTINGS = {
    # With Ray's default of 15, processes of the very lowest priority, such as the sandbox's helpers, still
    # take a third of the engines' CPU time.
    "RAY_worker_niceness": "0",
    # Ray would start a Python process for each processor. These processes would stay unused, because all our
    # actors have environments of their own. On machines where they were slow to start, ray.init did not
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


# Tells the guard of a run which of Ray's daemons it has to watch. run.guard.Guard.needs has the parameters.
Needs = Callable[..., None]


def connect(address: str | None, num_slots: int) -> Path | None:
    """Join a Ray cluster, or start one on this machine. Signal handlers of this process are not changed.

    If a cluster is started, the cluster's settings and token are set as environment variables of this
    process.

    address: HOST:PORT of the cluster to join. If None, a cluster is started.
    num_slots: number of devices that the run needs. A cluster that is started has at least as many CPUs.

    Returns the folder with Ray's files if a cluster was started. Returns None if a cluster was joined, or if
    this process was already connected. Raises UserError if nothing answers at the address, if the cluster
    refuses this process, or if the folder for Ray's files cannot be created or has too long a path.
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
        ray_patches.listen_on_loopback_only()
        # Other users of the machine can connect to loopback, so Ray asks for a token. Ray itself would write
        # a token into ~/.ray/auth_token. Everybody who may enter that home could read the token, and Ray
        # would fail if it could not write the file. The processes that Ray starts inherit our token.
        if not _ASKED_FOR & os.environ.keys():
            os.environ["RAY_AUTH_TOKEN"] = _own_token()
    else:
        del common["include_dashboard"]
    ray_patches.log_messages()
    in_time = ray_patches.wait_for_raylet(START_SECONDS, _raylet_runs)
    ports = ray_patches.choose_agent_ports()
    try:
        with ray_patches.keep_signal_handlers(), in_time, ports, refusals_said(address):
            ray.init(address=address or "local", **common)
    except BaseException:
        if folder:
            with contextlib.suppress(OSError):  # a folder with logs stays, because they may tell the cause
                folder.rmdir()
        raise
    return folder


@cache
def _own_token() -> str:
    """Return the secret token that protects the Ray clusters that this process starts.

    All calls return the same token, because Ray reads it only once in each process.
    """
    return secrets.token_hex(32)


def end_ray(needs: Needs) -> None:
    """End the Ray cluster that this process has started.

    needs: tells the guard to stop watching before the daemons end, because the guard would report their end
        as a failure.
    """
    needs(None)
    ray.shutdown()


def daemons() -> list[psutil.Process]:
    """Return the Ray daemons (raylet and GCS) that this process has started so far.

    The run's guard calls this to know which processes to watch.
    """
    found = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):  # ray.init starts many short-lived processes
            if child.name() in ("raylet", "gcs_server"):
                found.append(child)
    return found


def _raylet_runs() -> bool:
    """Return True if the raylet that this process has started still runs."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return any(
            daemon.name() == "raylet" and daemon.status() != psutil.STATUS_ZOMBIE for daemon in daemons()
        )
    return False
