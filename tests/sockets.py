"""What a run listens on, while it runs."""

import contextlib
import socket
import threading
import time

import psutil


class SocketWatch:
    """Within this context: notes on which addresses this process and all that it started listen. found: {address: who}."""

    def __init__(self):
        self.found: dict[str, str] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def _watch(self) -> None:
        while not self._ended.wait(0.3):
            for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
                with contextlib.suppress(psutil.Error):
                    self._note(process)

    def _note(self, process: psutil.Process) -> None:
        for connection in process.net_connections(kind="inet"):
            waits = connection.type == socket.SOCK_DGRAM and not connection.raddr
            if waits or connection.status == psutil.CONN_LISTEN:
                self.found[connection.laddr.ip.removeprefix("::ffff:")] = " ".join(process.cmdline())

    def __enter__(self) -> "SocketWatch":
        self._thread.start()
        return self

    def __exit__(self, *error) -> None:
        time.sleep(0.5)
        self._ended.set()
        self._thread.join()
