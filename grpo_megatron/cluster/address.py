"""The IPv4 address of a node, for job scripts: of one of its network interfaces, or what a host name stands for here.

python -m grpo_megatron.cluster.address (--interface NAME | --host NAME)
"""

import argparse
import socket
import sys

import psutil

from grpo_megatron.errors import UserError


def of_interface(name: str) -> str:
    """Of this node. Raises UserError, with the interfaces that there are, for one that is not there or has no IPv4 address."""
    found = {
        interface: [address.address for address in addresses if address.family == socket.AF_INET]
        for interface, addresses in psutil.net_if_addrs().items()
    }
    if found.get(name):
        return found[name][0]
    others = ", ".join(f"{interface} ({addresses[0]})" for interface, addresses in found.items() if addresses)
    problem = "has no IPv4 address" if name in found else "is not there"
    raise UserError(f"network interface {name} {problem} on node {socket.gethostname()}; it has {others}")


def of_host(name: str) -> str:
    """As this node resolves it. Raises UserError if it does not."""
    try:
        return socket.getaddrinfo(name, None, socket.AF_INET)[0][4][0]
    except OSError as error:
        raise UserError(f"node {socket.gethostname()} cannot resolve {name}: {error}") from error


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--interface")
    which.add_argument("--host")
    options = parser.parse_args()
    try:
        print(of_interface(options.interface) if options.interface else of_host(options.host))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
