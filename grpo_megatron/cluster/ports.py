"""Where a process on this node can listen for those of others."""

import socket
from contextlib import ExitStack

import ray


def free_address(ports: int = 1) -> str:
    """host:port of this node, of which this port and those behind it, `ports` in all, are free now."""
    while True:
        with ExitStack() as held:
            first = held.enter_context(socket.socket())
            first.bind(("", 0))
            port = first.getsockname()[1]
            try:
                for behind in range(port + 1, port + ports):
                    held.enter_context(socket.socket()).bind(("", behind))
            except (OSError, OverflowError):  # taken, or beyond the last port
                continue
        return f"{ray.util.get_node_ip_address()}:{port}"
