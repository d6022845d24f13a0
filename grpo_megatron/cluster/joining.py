"""What stands in the way of joining a Ray cluster or starting one, as one sentence; Ray raises errors of many types, some after minutes."""

import os
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ray.exceptions import RayError

from grpo_megatron.errors import UserError, shortened

# For a cluster that is just being started.
ANSWER_SECONDS = 30.0


@contextmanager
def refusals_said(address: str | None) -> Iterator[None]:
    """Around ray.init. address: the cluster's, None: one is started here. Raises UserError for what a user can act on."""
    if address:
        _must_answer(address)
    try:
        yield
    except (RayError, OSError) as error:
        if address and (isinstance(error, RayError) or "InvalidAuthToken" in str(error.__cause__)):
            raise UserError(
                f"the Ray cluster at cluster.ray_address={address} asks for a token, and this process has none or another one: set "
                "RAY_AUTH_MODE=token and RAY_AUTH_TOKEN as they were for its `ray start`"
            ) from error
        if address and isinstance(error, ConnectionError):
            raise UserError(
                f"cluster.ray_address={address} is not to be joined: {shortened(str(error).partition('. ')[0])}; it must be that of a "
                "Ray cluster that runs, of the same version of Ray, or null to start one on this machine"
            ) from error
        if "AF_UNIX path length" in str(error):
            raise UserError(
                f"the name of Ray's socket {str(error).rpartition(': ')[2]} is too long for the system; set {_folder()[0]} to a folder "
                "with a shorter name, such as /tmp"
            ) from error
        raise


def own_folder() -> Path:
    """Make a folder for the files of a Ray that is started here, which no other user and no other run has.

    Ray's own, /tmp/ray, belongs to whoever has run Ray first on the machine; nobody else could start one
    there. Raises UserError where it cannot be made.
    """
    variable, base = _folder()
    try:
        os.makedirs(base, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix="ray-", dir=base))
    except OSError as error:
        raise UserError(
            f"{base} cannot have the files of Ray: {error.strerror or error}; set {variable} to a folder that can be written to"
        ) from error


def _folder() -> tuple[str, str]:
    """Return the variable that says where Ray's files are, and what it says."""
    set_one = next((name for name in ("RAY_TMPDIR", "TMPDIR") if os.environ.get(name)), "")
    return (set_one, os.path.abspath(os.environ[set_one])) if set_one else ("RAY_TMPDIR", "/tmp")


def _must_answer(address: str) -> None:
    """Ray would try for minutes to reach what is not there, and write the reason into a log."""
    if address == "auto" or "://" in address:
        return  # which Ray knows how to find
    host, _, port = address.rpartition(":")
    if not host or not (port.isascii() and port.isdecimal()) or not 0 < int(port) < 2**16:
        raise UserError(
            f"cluster.ray_address={address} is no HOST:PORT, such as `ray start --head` shows; null starts Ray on this machine"
        )
    deadline = time.monotonic() + ANSWER_SECONDS
    while True:
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=5).close()
            return
        except (OSError, UnicodeError) as error:  # the second: no name of a host
            if time.monotonic() >= deadline:
                raise UserError(
                    f"nothing answers at cluster.ray_address={address} ({error}); start Ray there, correct the address, or leave it null "
                    "to start Ray on this machine"
                ) from error
        time.sleep(0.5)
