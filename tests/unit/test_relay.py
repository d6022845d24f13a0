"""The relay, by which programs without a network reach the endpoint of the model."""

import resource
import socket
import threading

import pytest

from grpo_megatron.sandbox import relay

MANY = 40


@pytest.fixture
def few_descriptors():
    """Leave this process room for some connections, but not for all."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    with socket.socket() as free:
        room = free.fileno() + 2 * MANY
    resource.setrlimit(resource.RLIMIT_NOFILE, (room, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def echo(listener: socket.socket) -> None:
    """Send back what a connection says first, with each connection in a thread."""

    def answer(connection):
        with connection:
            connection.sendall(connection.recv(9))

    while True:
        try:
            threading.Thread(target=answer, args=(listener.accept()[0],), daemon=True).start()
        except OSError:
            if listener.fileno() < 0:
                return


def test_too_many_connections_do_not_end_it(few_descriptors):
    """A program would otherwise wait forever for each later answer of the model."""
    with socket.create_server(("127.0.0.1", 0), backlog=99) as server:
        threading.Thread(target=echo, args=(server,), daemon=True).start()
        listener = socket.create_server(("127.0.0.1", 0), backlog=99)
        relay.serve(listener, server.getsockname()[1])
        address = listener.getsockname()
        opened = []

        def open_too_many():
            while True:
                opened.append(socket.create_connection(address))

        with pytest.raises(OSError, match="Too many open files"):
            open_too_many()
        for one in opened:
            one.close()
        with socket.create_connection(address, timeout=30) as last:
            last.sendall(b"hello")
            assert last.recv(9) == b"hello"
