"""What a run listens on, while it runs."""

import contextlib
import socket
import threading
import time

import psutil


def _sockets(process: psutil.Process) -> dict[tuple[int, str, int], str]:
    """{(process, address, port): its command line} of what it listens on."""
    command = " ".join(process.cmdline())
    return {
        (process.pid, connection.laddr.ip.removeprefix("::ffff:"), connection.laddr.port): command
        for connection in process.net_connections(kind="inet")
        if connection.status == psutil.CONN_LISTEN or (connection.type == socket.SOCK_DGRAM and not connection.raddr)
    }


class SocketWatch:
    """Within this context: notes on which addresses this process and all that it started listen. found: {address: who}."""

    def __init__(self):
        self.found: dict[str, str] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def _watch(self) -> None:
        before: dict[tuple[int, str, int], str] = {}
        while not self._ended.wait(0.3):
            now = {}
            for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
                with contextlib.suppress(psutil.Error):
                    now |= _sockets(process)
            # Whoever asks for this machine's own address opens a socket for a moment, and listens to nobody.
            self.found |= {address: now[key] for key in now.keys() & before.keys() for _, address, _ in [key]}
            before = now

    def __enter__(self) -> "SocketWatch":
        self._thread.start()
        return self

    def __exit__(self, *error) -> None:
        time.sleep(0.5)
        self._ended.set()
        self._thread.join()
