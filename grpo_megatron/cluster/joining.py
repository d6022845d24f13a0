"""Clear errors when a Ray cluster cannot be joined or started, and the folder for the files of a new one.

Ray raises errors of many types, some of them only after minutes. This module turns those that the user can
correct into UserErrors.
"""

import os
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ray.exceptions import RayError

from grpo_megatron.errors import UserError, shortened

# How long to wait for an answer, because the cluster may just be starting.
ANSWER_SECONDS = 30.0


@contextmanager
def refusals_said(address: str | None) -> Iterator[None]:
    """Context for a call of ray.init: turn its errors into UserErrors that say what the user can do.

    Errors that the user cannot correct are raised unchanged. Raises UserError before the context begins if
    nothing answers at `address`, or if it is not HOST:PORT.

    address: address of the Ray cluster to join. If None, ray.init starts a cluster on this machine.
    """
    if address:
        _must_answer(address)
    try:
        yield
    except (RayError, OSError) as error:
        if address and (isinstance(error, RayError) or "InvalidAuthToken" in str(error.__cause__)):
            raise UserError(
                f"the Ray cluster at cluster.ray_address={address} requires a token, but this process has "
                "none or a wrong one; set RAY_AUTH_MODE=token and the RAY_AUTH_TOKEN that the cluster's "
                "`ray start` had"
            ) from error
        if address and isinstance(error, ConnectionError):
            raise UserError(
                f"cannot join the Ray cluster at cluster.ray_address={address}: "
                f"{shortened(str(error).partition('. ')[0])}; check that it is running the same version of "
                "Ray, or set cluster.ray_address=null to start Ray on this machine"
            ) from error
        if "AF_UNIX path length" in str(error):
            raise UserError(
                f"the path of Ray's socket {str(error).rpartition(': ')[2]} is too long for the system; set "
                f"{_folder()[0]} to a folder with a shorter path, such as /tmp"
            ) from error
        raise


def own_folder() -> Path:
    """Create a folder for the files of the Ray cluster that this process starts, and return its path.

    Ray's default folder, /tmp/ray, belongs to the user who first ran Ray on the machine. Other users cannot
    start Ray with it. Raises UserError if the folder cannot be created.
    """
    variable, base = _folder()
    try:
        os.makedirs(base, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix="ray-", dir=base))
    except OSError as error:
        raise UserError(
            f"Ray's files cannot be written to {base}: {error.strerror or error}; set {variable} to a "
            "writable folder"
        ) from error


def _folder() -> tuple[str, str]:
    """Return the environment variable that selects the base folder for Ray's files, and this folder.

    The folder is /tmp if neither RAY_TMPDIR nor TMPDIR is set.
    """
    set_one = next((name for name in ("RAY_TMPDIR", "TMPDIR") if os.environ.get(name)), "")
    return (set_one, os.path.abspath(os.environ[set_one])) if set_one else ("RAY_TMPDIR", "/tmp")


def _must_answer(address: str) -> None:
    """Raise UserError if `address` is not HOST:PORT, or if no server answers there within ANSWER_SECONDS.

    Without this check, ray.init would try for minutes, and then write the reason only to a log. `auto` and
    addresses with `://` are not checked, because Ray itself resolves them.
    """
    if address == "auto" or "://" in address:
        return
    host, _, port = address.rpartition(":")
    if not host or not (port.isascii() and port.isdecimal()) or not 0 < int(port) < 2**16:
        raise UserError(
            f"cluster.ray_address={address} must have the form HOST:PORT, as `ray start --head` prints it, "
            "or be null to start Ray on this machine"
        )
    deadline = time.monotonic() + ANSWER_SECONDS
    while True:
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=5).close()
            return
        except (OSError, UnicodeError) as error:  # UnicodeError: not the name of a host
            if time.monotonic() >= deadline:
                raise UserError(
                    f"nothing answers at cluster.ray_address={address} ({error}); start Ray there, correct "
                    "the address, or leave it null to start Ray on this machine"
                ) from error
        time.sleep(0.5)
