"""Asks the ports of a host in every protocol that a run uses, and prints each one's answer as JSON.

    python -m tests.integration.stranger HOST TRAP PORT [PORT ...]

TRAP is a file that exists afterwards if any process unpickled what was sent. With a job's RAY_AUTH_TOKEN, or
a store's STORE_SECRET, in its environment, the caller is not a stranger: it presents them, and calls only
those of Ray's methods that change nothing.
"""

import contextlib
import http.client
import importlib
import json
import multiprocessing
import os
import pickle
import pkgutil
import socket
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import grpc
import torch.distributed as dist
import zmq
from ray.core import generated

from grpo_megatron.cluster.store import StoreAddress

# Served by programs in C++, and described in no Python module.
_METHODS_BESIDE = (
    "/ray.rpc.ObjectManagerService/Push",
    "/ray.rpc.ObjectManagerService/Pull",
    "/ray.rpc.syncer.RaySyncer/StartSync",
    "/grpc.health.v1.Health/Check",
    "/grpc.health.v1.Health/Watch",
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
    *(
        f"/grpc.channelz.v1.Channelz/Get{what}"
        for what in ("TopChannels", "Servers", "Server", "ServerSockets", "Socket")
    ),
)
_READING = (
    "/ray.rpc.NodeInfoGcsService/GetAllNodeInfo",
    "/ray.rpc.NodeManagerService/GetSystemConfig",
    "/ray.rpc.CoreWorkerService/GetCoreWorkerStats",
    "/ray.rpc.RayletDriver/ClusterInfo",
)
_SILENCE_SECONDS, _ANSWER_SECONDS = 2.0, 20.0


class _Trap:
    def __init__(self, path: str):
        self._path = path

    def __reduce__(self):
        return open, (self._path, "w")


def raw(host: str, port: int, sent: bytes) -> str:
    """Return the answer to these bytes in hex digits, until the port closes the connection or is silent."""
    received = b""
    with contextlib.suppress(OSError), socket.create_connection((host, port), _SILENCE_SECONDS) as connection:
        connection.sendall(sent)
        while chunk := connection.recv(2**16):
            received += chunk
    return received.hex()


def over_http(host: str, port: int, path: str, token: str | None) -> tuple[int, str] | None:
    """Return (status, body), or None if the port does not use HTTP."""
    connection = http.client.HTTPConnection(host, port, timeout=_SILENCE_SECONDS)
    with contextlib.closing(connection), contextlib.suppress(OSError, http.client.HTTPException):
        connection.request("GET", path, headers={"Authorization": f"Bearer {token}"} if token else {})
        answer = connection.getresponse()
        return answer.status, answer.read().decode(errors="replace")
    return None


def over_zmq(host: str, port: int, sent: bytes) -> None:
    """Send a request as SGLang's processes do to each other."""
    with zmq.Context() as context, context.socket(zmq.PUSH) as pushing:
        pushing.setsockopt(zmq.LINGER, int(_SILENCE_SECONDS * 1000))
        pushing.connect(f"tcp://{host}:{port}")
        with contextlib.suppress(zmq.Again):
            pushing.send(sent, zmq.NOBLOCK)


def methods() -> list[str]:
    """Return the methods of all services that one of Ray's processes may serve, by their gRPC names."""
    found = []
    for module in pkgutil.iter_modules(generated.__path__, f"{generated.__name__}."):
        if module.name.endswith("_pb2"):
            services = importlib.import_module(module.name).DESCRIPTOR.services_by_name.values()
            found += [
                f"/{service.full_name}/{method.name}" for service in services for method in service.methods
            ]
    return [*found, *_METHODS_BESIDE]


def over_grpc(host: str, port: int, token: str | None) -> dict[str, tuple[str, str]] | None:
    """Return {method: (status, hex digits of the first answer)} for empty requests, or None without gRPC."""
    # RaySyncer ends its process for a caller that does not name its node.
    metadata = [("node_id", "00" * 28), *([("authorization", f"Bearer {token}")] if token else [])]

    def call(method: str) -> tuple[str, str]:
        answers = channel.unary_stream(method)(b"", timeout=_ANSWER_SECONDS, metadata=metadata)
        try:
            return "OK", next(answers, b"").hex()
        except grpc.RpcError as error:
            return error.code().name, (error.details() or "").encode().hex()
        finally:
            answers.cancel()

    with grpc.insecure_channel(f"{host}:{port}") as channel, ThreadPoolExecutor(4) as pool:
        try:
            grpc.channel_ready_future(channel).result(_ANSWER_SECONDS)
        except grpc.FutureTimeoutError:
            return None
        asked = _READING if token else methods()
        return dict(zip(asked, pool.map(call, asked)))


def stored(host: str, port: int, secret: str | None) -> list[str]:
    """Return the keys of the store at this port or, with a secret, the value of the key `gated`."""
    try:
        if secret:
            # list_keys keeps the GIL, without which this process cannot answer the gate.
            return [StoreAddress(host, port, secret).connect(_ANSWER_SECONDS / 2).get("gated").decode()]
        return dist.TCPStore(
            host, port, is_master=False, timeout=timedelta(seconds=_SILENCE_SECONDS)
        ).list_keys()
    except (dist.DistError, RuntimeError, ValueError):
        return []


def all_stored(host: str, ports: list[int], secret: str | None) -> dict[int, list[str]]:
    """Call `stored` for each port in a process of its own: torch's client waits forever, with the GIL, for
    a silent port.
    """
    found = {}
    with multiprocessing.get_context("fork").Pool(len(ports)) as pool:
        asked = {port: pool.apply_async(stored, (host, port, secret)) for port in ports}
        deadline = time.monotonic() + 2 * _ANSWER_SECONDS
        for port, answer in asked.items():
            try:
                found[port] = answer.get(max(0.0, deadline - time.monotonic()))
            except multiprocessing.TimeoutError:
                found[port] = []
    return found


def ask(host: str, port: int, trap: str, token: str | None) -> dict[str, Any]:
    trapped = pickle.dumps(_Trap(trap))
    over_zmq(host, port, trapped)
    return {
        "raw": [raw(host, port, sent) for sent in (b"", trapped, bytes(64), b"\xff" * 512)],
        "http": [over_http(host, port, path, token) for path in ("/", "/metrics", "/api/version")],
        "grpc": over_grpc(host, port, token),
    }


def main() -> None:
    host, trap, *rest = sys.argv[1:]
    ports, token = [int(port) for port in rest], os.environ.get("RAY_AUTH_TOKEN")
    stores = all_stored(host, ports, os.environ.get("STORE_SECRET"))
    with ThreadPoolExecutor(len(ports)) as pool:
        answers = pool.map(lambda port: ask(host, port, trap, token), ports)
        print(json.dumps({port: answer | {"store": stores[port]} for port, answer in zip(ports, answers)}))


if __name__ == "__main__":
    main()
