"""Print the first of N consecutive free ports on this node.

slurm/train.sbatch uses it to choose the ports of Ray's head, to which the job's other nodes connect.

python -m grpo_megatron.cluster.ports --first PORT [--count N]
"""

import argparse
import socket
from contextlib import ExitStack
from itertools import repeat

_BEYOND = 65536
# Attempts with a port that the system chooses, because the ports that follow it may be taken
_ATTEMPTS = 1000


def free_address(ports: int = 1) -> str:
    """Find a free port of this node, at which a server can be started, and return HOST:PORT.

    HOST is the address that Ray uses for this node. PORT is free now, but is not reserved.

    ports: number of consecutive ports, beginning with PORT, that must be free.
    """
    import ray

    return f"{ray.util.get_node_ip_address()}:{free_ports(ports)}"


def free_ports(count: int, first: int = 0) -> int:
    """Find `count` consecutive ports that are free now on every interface of this node. Return the first one.

    first: lowest port to try; 0: let the system choose.

    Raises OSError if no such ports are found at or above `first`, or in 1,000 attempts with a port that the
    system chooses.
    """
    reason: Exception | None = None
    for start in range(first, _BEYOND - count + 1, count) if first else repeat(0, _ATTEMPTS):
        with ExitStack() as held:
            try:
                found = hold_port(held, start)
                for following in range(found + 1, found + count):
                    hold_port(held, following)
                return found
            except (OSError, OverflowError) as error:  # taken, or beyond the last port
                reason = error
    raise OSError(f"this node does not have {count} consecutive free ports") from reason


def hold_port(held: ExitStack, port: int = 0) -> int:
    """Bind a socket to a port until `held` is closed. Return the port. Raises OSError if the port is taken.

    The system then gives the port to no process that asks for any port. A server that sets SO_REUSEADDR, as
    most do, can use it.

    port: the port to bind; 0: let the system choose a free port.
    """
    holder = held.enter_context(socket.socket())
    # With SO_REUSEADDR, a port counts as free as soon as its last server has ended. Without this option, the
    # port stays taken for a minute, while the system keeps connections that the server has closed. Each job
    # on a node then took the port that was meant for the next job.
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind(("", port))
    return holder.getsockname()[1]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--first", type=int, required=True, help="port to try first")
    parser.add_argument("--count", type=int, default=1, help="number of consecutive ports")
    options = parser.parse_args()
    print(free_ports(options.count, options.first))


if __name__ == "__main__":
    main()
