"""Addresses that a run listens on."""

import contextlib
import socket
import threading
import time

import psutil

Socket = tuple[int, str, int]  # process, address, port


def listening(root: psutil.Process) -> dict[Socket, str]:
    """Return the sockets that this process and its descendants listen on: {socket: command line of its
    process}.
    """
    found = {}
    for process in [root, *root.children(recursive=True)]:
        with contextlib.suppress(psutil.Error):
            command = " ".join(process.cmdline())
            for connection in process.net_connections(kind="inet"):
                if connection.status == psutil.CONN_LISTEN or (
                    connection.type == socket.SOCK_DGRAM and not connection.raddr
                ):
                    found[process.pid, connection.laddr.ip.removeprefix("::ffff:"), connection.laddr.port] = (
                        command
                    )
    return found


class SocketWatch:
    """Context that records the addresses that this process and its descendants listen on.

    found: {address: command lines}. Sockets that this process already had are left out, such as a store of an
        earlier test, which stays open as long as the process lives.
    """

    def __init__(self):
        self.found: dict[str, set[str]] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def _watch(self) -> None:
        before: dict[Socket, str] = {}
        pause, looks_after_the_end = 0.3, 2
        while looks_after_the_end:
            if self._ended.wait(pause):
                # On a slow machine, what was opened shortly before the end has been seen once at most.
                looks_after_the_end -= 1
                time.sleep(0.3)
            begun = time.monotonic()
            now = listening(psutil.Process())
            # On a slow machine it would take as much time as what it watches, in the same process.
            pause = max(0.3, 4 * (time.monotonic() - begun))
            # Whoever asks for this machine's own address opens a socket for a moment, and listens to nobody.
            for key in (now.keys() & before.keys()) - self._earlier:
                self.found.setdefault(key[1], set()).add(now[key])
            before = now

    def __enter__(self) -> "SocketWatch":
        own = psutil.Process()
        self._earlier = {key for key in listening(own) if key[0] == own.pid}
        self._thread.start()
        return self

    def __exit__(self, *error) -> None:
        self._ended.set()
        self._thread.join()
