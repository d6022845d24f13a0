"""Access to the store through which processes find each other."""

import asyncio
import contextlib
import socket
import time
from dataclasses import replace

import psutil
import pytest
import torch.distributed as dist

from grpo_megatron.cluster.store import StoreAddress, StoreServer
from tests.sockets import Socket, listening


def own_address() -> str:
    """Return an address of this machine other than loopback."""
    found = [
        address.address
        for addresses in psutil.net_if_addrs().values()
        for address in addresses
        if address.family == socket.AF_INET
    ]
    others = [address for address in found if not address.startswith("127.")]
    if not others:
        pytest.skip("this machine has no address but loopback")
    return others[0]


def sockets() -> set[Socket]:
    """Return the sockets that this process listens on.

    A store of an earlier test lives as long as the process.
    """
    return set(listening(psutil.Process()))


def addresses(found: set[Socket]) -> set[str]:
    return {address for _, address, _ in found}


def test_on_loopback_nothing_else_listens():
    before = sockets()
    server = StoreServer("127.0.0.1", timeout=20)
    assert server.address.secret == ""
    assert addresses(sockets() - before) <= {"127.0.0.1"}
    server.address.connect(20).set("key", "value")
    assert server.store.get("key") == b"value"


def test_who_knows_the_secret_reaches_it_from_another_node():
    before = sockets()
    server = StoreServer(own_address(), timeout=20)
    client = server.address.connect(20)
    large = "x" * 2**20
    client.set("key", large)
    assert server.store.get("key") == large.encode()
    assert client.add("counter", 3) == 3
    server.store.set("late", "1")
    client.wait(["late"])
    assert addresses(sockets() - before) <= {"127.0.0.1", own_address()}


def test_who_asks_many_times_keeps_nothing_open():
    server, this = StoreServer(own_address(), timeout=20), psutil.Process()
    server.address.connect(20).set("key", "value")
    before = this.num_fds()
    for _ in range(20):
        assert server.address.connect(20).get("key") == b"value"
    deadline = time.monotonic() + 20
    while this.num_fds() > before and time.monotonic() < deadline:
        time.sleep(0.05)
    assert this.num_fds() <= before


def test_who_does_not_know_it_gets_nothing():
    server = StoreServer(own_address(), timeout=20)
    server.store.set("key", "value")
    stranger = replace(server.address, secret="00" * 32)
    with pytest.raises((dist.DistError, RuntimeError)):
        stranger.connect(2).get("key")
    # Without a proof: torch's own client, and one that only listens.
    with socket.create_connection((server.address.host, server.address.port), timeout=5) as plain:
        plain.sendall(b"\x00" * 64)
        received = b""
        with contextlib.suppress(ConnectionResetError):
            while chunk := plain.recv(4096):
                received += chunk
    assert len(received) == 32  # the question
    assert b"value" not in received
    assert "secret" not in repr(server.address)
    assert server.address.connect(20).get("key") == b"value"


def test_a_connection_that_the_server_closes_at_once_is_closed_here_too():
    async def forwarded() -> list:
        server = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            # The error keeps all objects of the call, so that nothing is closed by chance.
            with pytest.raises(EOFError) as raised:
                await StoreAddress("127.0.0.1", port, "00" * 32).forward(None, None)
            await asyncio.sleep(0.1)
            left = [one for one in psutil.Process().net_connections() if one.raddr and one.raddr.port == port]
            del raised
            return left

    assert asyncio.run(forwarded()) == []
