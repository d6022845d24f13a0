"""Messages if a Ray cluster cannot be joined or started.

tests/integration/test_cluster_probe.py asks a real one.
"""

import os
import socket

import pytest
import ray
from ray._private.utils import validate_socket_filepath

from grpo_megatron.cluster import joining, ray_connection
from grpo_megatron.cluster.ray_connection import connect
from grpo_megatron.errors import UserError


@pytest.fixture
def somebody_listens(monkeypatch):
    """The address of a server that is not Ray."""
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


@pytest.fixture(autouse=True)
def place_for_files(tmp_path, monkeypatch):
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    monkeypatch.setenv("TMPDIR", str(tmp_path))


def raises(monkeypatch, call):
    monkeypatch.setattr(ray, "init", lambda **_: call())


def test_nobody_listens(monkeypatch):
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(joining, "ANSWER_SECONDS", 0.0)
    raises(monkeypatch, lambda: pytest.fail("Ray would try for minutes"))
    says = (
        r"^nothing answers at cluster\.ray_address=127\.0\.0\.1:1 \(.*refused\); start Ray there, correct "
        r"the address, or leave it null"
    )
    with pytest.raises(UserError, match=says):
        connect("127.0.0.1:1", 0)


@pytest.mark.parametrize("address", ["head", "head:", ":6379", "head:99999", "head:0", "local"])
def test_what_is_no_address(address, monkeypatch):
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    with pytest.raises(UserError, match=rf"^cluster\.ray_address={address} must have the form HOST:PORT, as"):
        connect(address, 0)


def not_joined(reason):
    """Raise what ray.init raises, with the traceback of the cause in the text."""
    raise ConnectionError("Failed to connect to Ray cluster at head:1") from RuntimeError(
        f"Failed to connect to GCS. Last connection error: Traceback ...\n{reason}"
    )


def no_token():
    raise ray.exceptions.AuthenticationError(
        "Token authentication is enabled but no authentication token was found"
    )


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (
            no_token,
            r"^the Ray cluster at cluster\.ray_address=127\.\S+ requires a token, .* set "
            r"RAY_AUTH_MODE=token and the RAY_AUTH_TOKEN",
        ),
        (
            lambda: not_joined("RPC error: InvalidAuthToken: Authentication token is missing or incorrect"),
            "requires a token",
        ),
        (
            lambda: not_joined("TimedOut"),
            r"cannot join .* at cluster\.ray_address=127\.\S+: Failed to connect to Ray cluster at head:1; "
            r"check that it is running the same version of Ray",
        ),
    ],
)
def test_a_cluster_that_lets_nobody_in(call, says, somebody_listens, monkeypatch):
    raises(monkeypatch, call)
    with pytest.raises(UserError, match=says):
        connect(somebody_listens, 0)


@pytest.mark.parametrize("variable", ["TMPDIR", "RAY_TMPDIR"])
def test_a_folder_whose_name_is_too_long_for_sockets(variable, somebody_listens, monkeypatch):
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    monkeypatch.setenv(variable, folder := "/tmp/" + "x" * 90)
    raises(monkeypatch, lambda: validate_socket_filepath(f"{folder}/ray/session/sockets/plasma_store"))
    with pytest.raises(
        UserError,
        match=rf"^the path of Ray's socket {folder}/\S+ is too long for the system; "
        rf"set {variable} to a folder",
    ):
        connect(None, 2)


@pytest.mark.parametrize("variable", ["TMPDIR", "RAY_TMPDIR"])
def test_a_folder_that_cannot_be_made(variable, monkeypatch):
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    monkeypatch.setenv(variable, "/proc/nope")
    raises(monkeypatch, lambda: pytest.fail("Ray has no place for its files"))
    with pytest.raises(
        UserError,
        match=rf"^Ray's files cannot be written to /proc/nope: .*; set {variable} to a writable folder$",
    ):
        connect(None, 2)


def test_every_ray_has_a_folder_of_its_own(tmp_path, monkeypatch):
    """/tmp/ray belonged to another user if that user's Ray had run on the machine, and no run could start."""
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    given = []
    monkeypatch.setattr(ray, "init", lambda **options: given.append(options["_temp_dir"]))
    monkeypatch.setattr(os, "environ", dict(os.environ))
    folders = [connect(None, 2), connect(None, 2)]
    assert sorted(tmp_path.iterdir()) == sorted(folders)
    assert given == [f"{folder}/r" for folder in folders]
    assert folders[0] != folders[1]
    for folder in folders:
        assert folder.parent == tmp_path
        assert folder.stat().st_mode & 0o777 == 0o700
        # What Ray adds, with a process number of seven digits, on a machine that has /tmp.
        longest = f"/tmp/{folder.name}/r/session_2026-11-25_11-03-07_244360_1234567/sockets/plasma_store"
        validate_socket_filepath(longest)
        assert len(longest) < 90


def test_what_is_no_users_fault_stays_what_it_is(monkeypatch):
    monkeypatch.setattr(ray, "is_initialized", lambda: False)

    def fail():
        raise OSError("of ours")

    raises(monkeypatch, fail)
    with pytest.raises(OSError, match="of ours"):
        connect(None, 2)


@pytest.mark.parametrize("said", [None, "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"])
def test_the_ray_of_a_run_has_a_token_of_its_own_unless_the_user_has_said_otherwise(said, monkeypatch):
    """Ray's own token was in a file that others may read. The home folder may also be read-only."""
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH_")} | (
        {said: "x"} if said else {}
    )
    seen = []
    raises(
        monkeypatch,
        lambda: seen.append(
            {name: value for name, value in os.environ.items() if name.startswith("RAY_AUTH_")}
        ),
    )
    for _ in range(2):
        monkeypatch.setattr(os, "environ", environment)
        assert connect(None, 2)
    first, second = seen
    if said:
        assert first == second == {said: "x"}
    else:
        assert len(first["RAY_AUTH_TOKEN"]) == 64
        assert first == second
        # Ray reads the token once in a process, so another one would not be known to it.
        assert connect_without_variables(monkeypatch, seen) == first
        ray_connection._own_token.cache_clear()  # as in another process
        assert connect_without_variables(monkeypatch, seen) != first


def connect_without_variables(monkeypatch, seen):
    monkeypatch.setattr(os, "environ", {})
    connect(None, 2)
    return seen[-1]
