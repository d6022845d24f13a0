"""Where a process on this node can listen for those of others.

python -m grpo_megatron.cluster.ports --first PORT [--count N]: for job scripts, prints the first of N free ports in a row.
"""

import argparse
import socket
from contextlib import ExitStack

_BEYOND = 65536


def free_address(ports: int = 1) -> str:
    """host:port of this node, of which this port and those behind it, `ports` in all, are free now."""
    import ray

    return f"{ray.util.get_node_ip_address()}:{free_ports(ports)}"


def free_ports(count: int, first: int = 0) -> int:
    """A port from which on `count` are free now on every interface: the first such one from `first` on, 0: any.

    Raises OSError where there are none.
    """
    while first + count <= _BEYOND:
        with ExitStack() as held:
            try:
                found = _hold(held, first)
                for behind in range(found + 1, found + count):
                    _hold(held, behind)
                return found
            except (OSError, OverflowError):  # taken, or beyond the last port
                first = first + count if first else 0
    raise OSError(f"no {count} ports in a row are free")


def _hold(held: ExitStack, port: int) -> int:
    """The port, or another one for 0, as long as `held` is open. Raises OSError if somebody has it."""
    holder = held.enter_context(socket.socket())
    # A port is free again when its last server has ended; without this, not before a minute later, while the system still keeps
    # connections that the server has closed. Each job on a node then took the port that the next one was to have.
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind(("", port))
    return holder.getsockname()[1]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--first", type=int, required=True)
    parser.add_argument("--count", type=int, default=1)
    options = parser.parse_args()
    print(free_ports(options.count, options.first))


if __name__ == "__main__":
    main()
