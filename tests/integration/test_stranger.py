"""A run on a cluster's network interface, and a stranger in the same network without the job's token."""

import contextlib
import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import pytest
import torch.distributed as dist

from grpo_megatron.cluster.ports import free_ports
from grpo_megatron.cluster.store import StoreServer
from tests.integration.ends import LiveRun, arguments
from tests.sockets import SocketWatch, listening

pytestmark = [pytest.mark.slow, pytest.mark.alone, pytest.mark.timeout(1800)]

# Several runs of this test on one machine do not meet.
NUMBER = os.getpid() % 256
HERE, THERE = f"10.77.{NUMBER}.1", f"10.77.{NUMBER}.2"
LINK, PEER, SPACE = f"grpo{NUMBER}", f"grpo{NUMBER}x", f"grpo-stranger-{os.getpid()}"
EVERYWHERE = "::"

# A role for each part of a command line; the first that fits.
ROLES = {
    "/gcs/gcs_server": "GCS",
    "/raylet/raylet": "raylet",
    "ray.util.client.server": "client server",
    "runtime_env/agent": "runtime environments",
    "ray::RuntimeEnvAgent": "runtime environments",
    "sglang::": "scheduler",
    "ray::_Worker": "rank",
    "ray::": "worker",
    "default_worker.py": "worker",
    "grpo_megatron.cli train": "driver",
}
# What gRPC answers to everyone, beside Ray's own services.
OPEN = {
    "/grpc.health.v1.Health/Check",
    "/grpc.health.v1.Health/Watch",
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
    "/grpc.channelz.v1.Channelz/GetTopChannels",
    "/grpc.channelz.v1.Channelz/GetServers",
    "/grpc.channelz.v1.Channelz/GetServer",
    "/grpc.channelz.v1.Channelz/GetServerSockets",
    "/grpc.channelz.v1.Channelz/GetSocket",
}
CLIENT = """
import sys, ray
ray.init(sys.argv[1], log_to_driver=False)
print("ran", ray.get(ray.remote(lambda: 6 * 7).remote()))
"""
# Without the name of a node, which the project's stranger gives in the other calls.
END_RAY = """
import sys, grpc
list(grpc.insecure_channel(sys.argv[1]).stream_stream("/ray.rpc.syncer.RaySyncer/StartSync")\
(iter([]), timeout=20))
"""


def role(command: str) -> str:
    return next((name for part, name in ROLES.items() if part in command), command)


@pytest.fixture(scope="module")
def network():
    """A network with this machine at HERE and a stranger at THERE."""

    def ip(*command: str) -> None:
        subprocess.run(["ip", *command], check=True, capture_output=True, text=True)

    with contextlib.ExitStack() as stack:
        try:
            ip("netns", "add", SPACE)
            stack.callback(ip, "netns", "del", SPACE)
            ip("link", "add", LINK, "type", "veth", "peer", "name", PEER, "netns", SPACE)
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"no network namespace can be made here: {getattr(error, 'stderr', '') or error}")
        ip("addr", "add", f"{HERE}/24", "dev", LINK)
        ip("link", "set", LINK, "up")
        ip("-n", SPACE, "addr", "add", f"{THERE}/24", "dev", PEER)
        for device in (PEER, "lo"):
            ip("-n", SPACE, "link", "set", device, "up")
        yield


class Job:
    """A Ray cluster on an interface, started like slurm/train.sbatch does.

    token, environment: for processes that join it.
    head: its process.
    """

    def __init__(self, temporary: str):
        self.port = free_ports(2, first=21000)
        self.address, self.client_address = f"{HERE}:{self.port}", f"ray://{HERE}:{self.port + 1}"
        self.token = secrets.token_hex(32)
        self.environment = outside() | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": self.token}
        self.environment |= {
            "GLOO_SOCKET_IFNAME": LINK,
            "NCCL_SOCKET_IFNAME": LINK,
            "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
        }
        places = [
            f"--node-ip-address={HERE}",
            f"--port={self.port}",
            f"--ray-client-server-port={self.port + 1}",
        ]
        ports = ["--min-worker-port=0", "--max-worker-port=0"]
        others = [
            "--include-dashboard=false",
            "--no-monitor",
            "--disable-usage-stats",
            "--num-cpus=4",
            f"--temp-dir={temporary}",
            "--block",
        ]
        ray = Path(sys.executable).with_name("ray")
        self.head = subprocess.Popen([ray, "start", "--head", *places, *ports, *others], env=self.environment)


def outside() -> dict[str, str]:
    """Return the environment of a process that knows of no Ray."""
    return {key: value for key, value in os.environ.items() if not key.startswith(("RAY_", "GLOO_", "NCCL_"))}


@pytest.fixture
def job(network):
    temporary = tempfile.mkdtemp(prefix="ray")  # not the machine's Ray's own; paths of sockets must be short
    job = Job(temporary)
    wait = [
        sys.executable,
        "-m",
        "grpo_megatron.cluster.wait",
        "--address",
        job.address,
        "--nodes",
        "1",
        "--timeout",
        "300",
    ]
    try:
        subprocess.run(wait, env=job.environment, check=True)
        yield job
    finally:
        processes = []
        with contextlib.suppress(psutil.NoSuchProcess):  # it has ended, and its daemons with it
            processes = psutil.Process(job.head.pid).children(recursive=True)
        for process in [*processes, job.head]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        job.head.wait(60)
        psutil.wait_procs(processes, 60)
        shutil.rmtree(temporary, ignore_errors=True)


def asked(*command: str, timeout: float, **environment: str) -> str:
    """Run Python with these arguments as the stranger.

    Return its output, even if it takes too long and is killed.
    """
    whole = ["ip", "netns", "exec", SPACE, sys.executable, *command]
    done = subprocess.Popen(
        whole, env=outside() | environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        output, errors = done.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        done.kill()
        output, errors = done.communicate()
    print(errors[-3000:], file=sys.stderr)
    return output


def answers(trap: Path, ports: list[int], **environment: str) -> dict[int, dict]:
    """Return the answers of each port to tests.integration.stranger."""
    printed = asked(
        "-m", "tests.integration.stranger", HERE, str(trap), *map(str, ports), timeout=400, **environment
    )
    return {int(port): answer for port, answer in json.loads(printed.splitlines()[-1]).items()}


def kind(answer: dict) -> str:
    """Return what kind of port answers like this to a caller without credentials."""
    if answer["grpc"] is not None:
        return "gRPC"
    if all(answer["http"]):
        return "HTTP"
    if answer["raw"] == [""] * len(answer["raw"]):
        return "silent"
    # A question of 32 random bytes, and no more.
    return "gate" if all(len(received) == 64 for received in answer["raw"]) else "unknown"


def statuses(answer: dict) -> dict[str, set[str]]:
    """Return {gRPC status: methods that had it}."""
    found: dict[str, set[str]] = {}
    for method, (status, _) in answer["grpc"].items():
        found.setdefault(status, set()).add(method)
    return found


def content(answer: dict) -> bytes:
    """Return everything that a port has sent."""
    told = [*answer["raw"], *(told for _, told in (answer["grpc"] or {}).values())]
    pages = [body.encode() for _, body in filter(None, answer["http"])]
    return b"\n".join([*map(bytes.fromhex, told), *pages, *(key.encode() for key in answer["store"])])


def must_be_listened_on(found: dict[str, set[str]]) -> None:
    """Check who listens where.

    found: {address: command lines} of the whole run.
    """
    roles = {address: {role(command) for command in commands} for address, commands in found.items()}
    assert roles.keys() == {"127.0.0.1", HERE, EVERYWHERE}, roles
    assert {"GCS", "raylet"} <= roles[EVERYWHERE] <= {"GCS", "raylet", "worker", "rank", "driver"}, roles
    assert roles[HERE] == {"client server", "runtime environments", "driver", "rank", "scheduler"}, roles


def must_tell_nothing(told: dict[int, dict], owners: dict[int, tuple[str, str]]) -> None:
    """Check that a stranger learns nothing.

    told: {port: its answers}.
    owners: {port: (address, role)}.
    """
    kinds = {port: kind(told[port]) for port in owners}
    by_kind = {name: {owners[port] for port in owners if kinds[port] == name} for name in {*kinds.values()}}
    assert by_kind.keys() == {"gRPC", "HTTP", "gate", "silent"}, by_kind
    assert {owner for owner in by_kind["gRPC"] if owner[0] == HERE} == {(HERE, "client server")}
    assert by_kind["HTTP"] == {(HERE, "runtime environments")}
    # Of the driver's store for weight sync, and of that by which the ranks find each other.
    assert by_kind["gate"] == {(HERE, "driver"), (HERE, "rank")}
    assert by_kind["silent"] == {(HERE, "rank"), (HERE, "scheduler")}  # gloo
    for port in owners:
        assert told[port]["store"] == [], owners[port]
        if kinds[port] == "HTTP":
            assert {status for status, _ in told[port]["http"]} == {401}
        if kinds[port] == "gRPC":
            found = statuses(told[port])
            refused = found.pop("UNAUTHENTICATED") | found.pop("UNIMPLEMENTED")
            assert not set().union(*found.values()) - OPEN, found
            assert refused >= OPEN if owners[port][1] == "client server" else not OPEN & refused, owners[port]


def must_open_with_the_token(told: dict[int, dict], owners: dict[int, tuple[str, str]]) -> None:
    """Check that a caller with the token gets answers. The arguments are those of must_tell_nothing."""
    for port, (_, name) in owners.items():
        if kind(told[port]) == "HTTP":
            assert 401 not in {status for status, _ in told[port]["http"]}
        else:
            assert "UNAUTHENTICATED" not in statuses(told[port]), name
    nodes = [
        answer["grpc"]["/ray.rpc.NodeInfoGcsService/GetAllNodeInfo"]
        for answer in told.values()
        if answer["grpc"]
    ]
    assert any(status == "OK" and HERE.encode() in bytes.fromhex(answer) for status, answer in nodes)


def test_a_stranger_gets_nothing(job, arithmetic, tmp_path):
    sizes = [
        "megatron.tensor_parallel=2",
        "weight_sync.transport=groups",
        f"cluster.ray_address={job.address}",
    ]
    run = LiveRun("train", arguments(arithmetic, tmp_path / "runs", *sizes), tmp_path, job.environment)
    trap = tmp_path / "trap"
    with run:
        with SocketWatch() as watch:
            run.wait_for(lambda: run.steps() >= 2, seconds=600)
        must_be_listened_on({address: {*filter(of_the_job, who)} for address, who in watch.found.items()})

        def sockets() -> dict:
            return listening(psutil.Process(job.head.pid)) | listening(psutil.Process(run.keeper.pid))

        before = sockets()
        # Two stores show that the stranger finds what can be found: one without a secret, and one with a
        # secret.
        bare = dist.TCPStore(HERE, 0, is_master=True, wait_for_workers=False)
        gated = StoreServer(HERE, timeout=20)
        bare.set("bare", "value")
        gated.store.set("gated", "value")
        stores = [bare.port, gated.address.port]
        reachable = {socket for socket in before if socket[1] != "127.0.0.1"}
        told = answers(trap, [*{port for _, _, port in reachable}, *stores])
        # Without workers that Ray has ended meanwhile, for want of work.
        owners = {socket[2]: (socket[1], role(before[socket])) for socket in reachable & sockets().keys()}
        must_tell_nothing(told, owners)
        assert [told[port]["store"] for port in stores] == [["bare"], []]
        everything = b"\n".join(content(told[port]) for port in owners)
        for known in (job.token, str(tmp_path / "runs"), str(arithmetic), "grpo_megatron", "sglang"):
            assert known.encode() not in everything
        assert "ran 42" not in asked("-c", CLIENT, job.client_address, timeout=60)

        guarded = {port: owner for port, owner in owners.items() if kind(told[port]) in ("gRPC", "HTTP")}
        told = answers(trap, [*guarded, *stores], RAY_AUTH_TOKEN=job.token, STORE_SECRET=gated.address.secret)
        must_open_with_the_token(told, guarded)
        assert told[stores[1]]["store"] == ["value"]
        token = {name: value for name, value in job.environment.items() if name.startswith("RAY_AUTH_")}
        # Ray gives up a client for which it has not started a process within 30 s. The run takes all cores.
        tries = (asked("-c", CLIENT, job.client_address, timeout=240, **token) for _ in range(3))
        assert any("ran 42" in printed for printed in tries)

        assert not trap.exists()
        steps = run.steps()
        run.wait_for(lambda: run.steps() > steps + 2, seconds=240)
        # What a stranger can do (docs/security.md): Ray ends, and the run with it.
        asked("-c", END_RAY, job.address, timeout=60)
        job.head.wait(120)
        assert run.ended(240) != 0


def of_the_job(command: str) -> bool:
    """Return False for a process of another test's Ray, or of the tests themselves."""
    return role(command) != command
