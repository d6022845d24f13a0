"""Relay: the connections of a program without a network reach one port of the machine's loopback."""

import contextlib
import socket
import threading
import time

_READ_AT_ONCE = 1 << 16
_PAUSE_SECONDS = 0.1


def serve(listener: socket.socket, port: int) -> None:
    """Forward connections to `listener` to a port of this process's loopback, in threads, from now on.

    listener: listens in the network namespace of a program, whose processes can reach nothing else.
    """
    threading.Thread(target=_accept, args=(listener, port), daemon=True).start()


def _accept(listener: socket.socket, port: int) -> None:
    while True:
        try:
            near, _ = listener.accept()
            threading.Thread(target=_forward, args=(near, port), daemon=True).start()
        except (OSError, RuntimeError):  # too many descriptors or threads: connections that close make room
            time.sleep(_PAUSE_SECONDS)


def _forward(near: socket.socket, port: int) -> None:
    """Forward a connection until both sides have closed it."""
    with near, contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)) as far:
        answers = threading.Thread(target=_copy, args=(far, near), daemon=True)
        answers.start()
        _copy(near, far)
        answers.join()


def _copy(source: socket.socket, target: socket.socket) -> None:
    """Copy all bytes of one direction, and then close this direction. An error closes both directions."""
    try:
        while data := source.recv(_READ_AT_ONCE):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)
    except OSError:
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
