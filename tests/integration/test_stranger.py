"""A run on a cluster's interface, and a stranger in the same network who does not know its token."""

import contextlib
import json
import os
import secrets
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.integration.test_train import arguments
from tests.sockets import SocketWatch

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

HERE, THERE, LINK, SPACE = "10.77.31.1", "10.77.31.2", "grpo-veth0", "grpo-stranger"

# What the stranger tries on a port, and what came of it: of torch's store, and of Ray.
ASK_STORE = """
import sys, datetime, torch.distributed as dist
found = []
for port in sys.argv[2:]:
    try:
        store = dist.TCPStore(sys.argv[1], int(port), is_master=False, timeout=datetime.timedelta(seconds=3))
        found += [(port, key) for key in store.list_keys()]
    except (RuntimeError, ValueError):
        pass
print("FOUND", found)
"""
ASK_RAY = """
import sys, ray
try:
    ray.init(address=sys.argv[1], log_to_driver=False, logging_level="error")
    print("FOUND", ray.nodes())
except BaseException as error:
    print("REFUSED", type(error).__name__)
"""


def ip(*command: str) -> None:
    subprocess.run(["ip", *command], check=True, capture_output=True)


@pytest.fixture(scope="module")
def network():
    """A network with this machine at HERE and nobody else but a stranger at THERE."""
    try:
        ip("netns", "add", SPACE)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no network namespace can be made here: {error}")
    try:
        ip("link", "add", LINK, "type", "veth", "peer", "name", "grpo-veth1", "netns", SPACE)
        ip("addr", "add", f"{HERE}/24", "dev", LINK)
        ip("link", "set", LINK, "up")
        ip("-n", SPACE, "addr", "add", f"{THERE}/24", "dev", "grpo-veth1")
        ip("-n", SPACE, "link", "set", "grpo-veth1", "up")
        yield
    finally:
        ip("netns", "del", SPACE)


@pytest.fixture
def ray_head(network):
    """A Ray of the job scripts' kind on the interface: its address, and the environment with its token."""
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    environment = os.environ | token | {"GLOO_SOCKET_IFNAME": LINK, "NCCL_SOCKET_IFNAME": LINK}
    address = f"{HERE}:26379"
    start = ["ray", "start", "--head", f"--node-ip-address={HERE}", "--port=26379", "--num-cpus=4", "--include-dashboard=false"]
    head = subprocess.Popen([str(Path(sys.executable).parent / start[0]), *start[1:], "--block"], env=environment)
    yield address, environment
    for process in [*psutil.Process(head.pid).children(recursive=True), psutil.Process(head.pid)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    head.wait(30)


def asked(script: str, *arguments: str) -> str:
    """What a script says that runs as the stranger; without the token."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
    command = ["ip", "netns", "exec", SPACE, sys.executable, "-c", script, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    return done.stdout.strip().splitlines()[-1] if done.stdout.strip() else f"exit status {done.returncode}"


def test_a_stranger_gets_nothing(ray_head, arithmetic, tmp_path):
    address, environment = ray_head
    changes = [
        f"cluster.ray_address={address}",
        "run.total_steps=1000",
        "megatron.tensor_parallel=2",
        "weight_sync.transport=groups",
    ]
    command = [sys.executable, "-m", "grpo_megatron.cli", "train", *arguments(arithmetic, tmp_path, *changes)]
    rows = tmp_path / "run" / "metrics.jsonl"
    with SocketWatch() as sockets:
        run = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        try:
            deadline = time.monotonic() + 600
            while not (rows.is_file() and '"step": 1,' in rows.read_text()):
                assert run.poll() is None, run.communicate()[0][-3000:]
                assert time.monotonic() < deadline
                time.sleep(0.5)
            open_ports = [port for ip_address, port in sockets.listening() if not ip_address.startswith("127.")]
            stores, by_ray = asked(ASK_STORE, HERE, *map(str, open_ports)), asked(ASK_RAY, address)
        finally:
            run.kill()
            run.communicate()
    # Ray's own daemons and workers listen on every interface, and ask for the token.
    others = {where: who for where, who in sockets.found.items() if where not in ("127.0.0.1", HERE)}
    assert set(others) <= {"::", "0.0.0.0"}, json.dumps(others)
    assert open_ports
    assert stores == "FOUND []"
    assert by_ray.startswith(("REFUSED", "exit status"))
