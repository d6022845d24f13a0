"""What a run listens on, while it runs."""

import contextlib
import socket
import threading
import time

import psutil

Socket = tuple[int, str, int]  # process, address, port


def listening(root: psutil.Process) -> dict[Socket, str]:
    """What this process and all that descend from it listen on: {socket: its process's command line}."""
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
    """Within this context: notes on which addresses this process and all that it started listen. found: {address: command lines}.

    Left out is what this process itself listened on before, as a store of an earlier test does for as long as the process lives.
    """

    def __init__(self):
        self.found: dict[str, set[str]] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def _watch(self) -> None:
        before: dict[Socket, str] = {}
        pause = 0.3
        while not self._ended.wait(pause):
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
        time.sleep(0.5)
        self._ended.set()
        self._thread.join()
