"""A key-value store (torch's TCPStore) by which processes find each other, protected by a secret.

torch's own server listens on every interface and answers everyone. Here the server listens on loopback only.
Processes on other nodes reach it through a proxy that listens on this node's address. The proxy first asks
for a proof (an HMAC of a nonce) that the caller knows the secret. Clients do the same through a second proxy
on their own loopback, because TCPStore itself cannot send the proof.
"""

import asyncio
import hashlib
import hmac
import secrets
import socket
import threading
from collections.abc import Awaitable, Callable
from contextlib import closing, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache
from ipaddress import ip_address

import torch.distributed as dist

_LOOPBACK = "127.0.0.1"
_NONCE_BYTES, _PROOF_BYTES, _PROOF_SECONDS = 32, 32, 20.0
_CHUNK = 2**16

_Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@dataclass(frozen=True)
class StoreAddress:
    """Address and secret of a key-value store. All processes that may use the store get this object.

    host, port: address of the proxy in front of the store, or of the store itself if it uses loopback only
    secret: hex digits; empty on loopback. A process that has the secret may read and write all keys.
    """

    host: str
    port: int
    secret: str = field(default="", repr=False)

    def connect(self, timeout: float) -> dist.TCPStore:
        """Return a new client of the store. Raises torch's DistNetworkError if there is no server.

        timeout: seconds that a request to the store may wait for its answer, such as for a missing key.
        """
        port = _way_to(self) if self.secret else self.port
        return dist.TCPStore(_LOOPBACK, port, is_master=False, timeout=timedelta(seconds=timeout))

    async def forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Forward the connection of a client on this node to the store on another node, until one side ends.

        The client has connected to a proxy on this node, which calls this function. The function connects to
        a second proxy, which is in front of the store, and proves to it that this node knows the secret.

        reader, writer: streams of the client's connection.
        """
        there_reader, there_writer = await asyncio.open_connection(self.host, self.port)
        with closing(there_writer):
            nonce = await there_reader.readexactly(_NONCE_BYTES)
            there_writer.write(_proof(self.secret, nonce))
            await _join((reader, writer), (there_reader, there_writer))


@cache
def _way_to(address: StoreAddress) -> int:
    """Start a proxy on loopback that forwards connections to a store, and return the proxy's port.

    Later calls with the same address return the port of the same proxy. Clients connect again and again, and
    a new proxy for each connection would use up the file descriptors.
    """
    return _listen(_LOOPBACK, address.forward)


class StoreServer:
    """A key-value store that this process serves as long as the process lives.

    store: this process's own client of the store
    address: address and secret of the store, for other processes that may use it
    """

    def __init__(self, host: str, timeout: float):
        """Start the server in this process.

        host: the address of this node at which other processes connect. They connect to a proxy, which asks
            for a secret. If `host` is a loopback address, they connect to the store itself, without a secret.
        timeout: seconds that a request of the client `store` may wait for its answer
        """
        listening = socket.create_server((_LOOPBACK, 0))
        self._port = listening.getsockname()[1]
        self.store = dist.TCPStore(
            _LOOPBACK,
            self._port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=timeout),
            master_listen_fd=listening.detach(),
        )
        if ip_address(host).is_loopback:
            self.address = StoreAddress(_LOOPBACK, self._port)
        else:
            self._secret = secrets.token_hex(32)
            self.address = StoreAddress(host, _listen(host, self._admit), self._secret)

    async def _admit(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Handle a connection to the proxy: check the secret, then pass bytes to and from the store.

        If the client does not prove that it knows the secret, the connection is closed without an answer.
        Otherwise it lasts until one side ends it.

        reader, writer: streams of the connection.
        """
        nonce = secrets.token_bytes(_NONCE_BYTES)
        writer.write(nonce)
        proof = await asyncio.wait_for(reader.readexactly(_PROOF_BYTES), _PROOF_SECONDS)
        if hmac.compare_digest(proof, _proof(self._secret, nonce)):
            await _join((reader, writer), await asyncio.open_connection(_LOOPBACK, self._port))


def _proof(secret: str, nonce: bytes) -> bytes:
    """Return the HMAC-SHA256 of `nonce`, by which a client proves that it knows the secret.

    secret: hex digits, which are the key of the HMAC.
    nonce: random bytes that the other side has sent.
    """
    return hmac.digest(bytes.fromhex(secret), nonce, hashlib.sha256)


def _listen(host: str, handler: _Handler) -> int:
    """Start a server thread that accepts connections on a free port of this node. Return the port.

    host: an address of this node.
    handler: async function that serves one connection. Its arguments are the streams (reader, writer).
    """
    listening = socket.create_server((host, 0))

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # A caller that sends nothing, sends something else, or disconnects is no error of this process.
        with suppress(OSError, EOFError, asyncio.TimeoutError):
            await handler(reader, writer)
        writer.close()

    async def serve() -> None:
        server = await asyncio.start_server(handle, sock=listening)
        await server.serve_forever()

    threading.Thread(target=asyncio.run, args=(serve(),), name="store", daemon=True).start()
    return listening.getsockname()[1]


async def _join(*ends: tuple[asyncio.StreamReader, asyncio.StreamWriter]) -> None:
    """Pass bytes in both directions between two connections until one of them ends. Close the second one.

    ends: the two connections, each as (reader, writer). The caller must close the first one.
    """
    (reader, writer), (there_reader, there_writer) = ends
    passing = {
        asyncio.ensure_future(_pass(reader, there_writer)),
        asyncio.ensure_future(_pass(there_reader, writer)),
    }
    await asyncio.wait(passing, return_when=asyncio.FIRST_COMPLETED)
    for task in passing:
        task.cancel()
    await asyncio.gather(*passing, return_exceptions=True)
    there_writer.close()


async def _pass(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while chunk := await reader.read(_CHUNK):
        writer.write(chunk)
        await writer.drain()
