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
                listener = held.enter_context(socket.socket())
                listener.bind(("", first))
                found = listener.getsockname()[1]
                for behind in range(found + 1, found + count):
                    held.enter_context(socket.socket()).bind(("", behind))
                return found
            except (OSError, OverflowError):  # taken, or beyond the last port
                first = first + count if first else 0
    raise OSError(f"no {count} ports in a row are free")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first", type=int, required=True)
    parser.add_argument("--count", type=int, default=1)
    options = parser.parse_args()
    print(free_ports(options.count, options.first))


if __name__ == "__main__":
    main()
