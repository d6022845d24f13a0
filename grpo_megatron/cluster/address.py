"""Print the IPv4 address of a network interface of this node, or the address of a host name.

slurm/train.sbatch uses it to find the address at which the job's nodes reach each other.

python -m grpo_megatron.cluster.address (--interface NAME | --host NAME)
"""

import argparse
import socket
import sys
from ipaddress import ip_address

import psutil

from grpo_megatron.errors import UserError


def of_interface(name: str) -> str:
    """Return the IPv4 address of a network interface of this node.

    Raises UserError if the interface does not exist or has no IPv4 address. The message lists the node's
    other interfaces.
    """
    found = _by_interface()
    if found.get(name):
        return found[name][0]
    others = ", ".join(f"{interface} ({addresses[0]})" for interface, addresses in found.items() if addresses)
    problem = "has no IPv4 address" if name in found else "does not exist"
    raise UserError(
        f"network interface {name} {problem} on node {socket.gethostname()}; choose one of the "
        f"node's interfaces: {others}"
    )


def loopback_interface() -> str:
    """Return the name of this node's loopback interface, to restrict gloo and NCCL to it.

    The interface is found by its address (127.0.0.1 or another loopback address). Raises UserError if the
    node has no loopback interface.
    """
    for interface, addresses in _by_interface().items():
        if any(ip_address(address).is_loopback for address in addresses):
            return interface
    raise UserError(
        f"node {socket.gethostname()} has no loopback interface, which its processes need to connect to each "
        "other; enable it, for example with `ip link set lo up`"
    )


def _by_interface() -> dict[str, list[str]]:
    """Return {name of a network interface of this node: its IPv4 addresses}."""
    return {
        interface: [address.address for address in addresses if address.family == socket.AF_INET]
        for interface, addresses in psutil.net_if_addrs().items()
    }


def of_host(name: str) -> str:
    """Return the IPv4 address that this node resolves a host name to.

    If the name has several addresses, an address other than a loopback address is preferred. Raises UserError
    if the name cannot be resolved.
    """
    try:
        addresses = [found[4][0] for found in socket.getaddrinfo(name, None, socket.AF_INET)]
    except OSError as error:
        raise UserError(
            f"node {socket.gethostname()} cannot resolve {name}: {error}; check the name"
        ) from error
    return min(addresses, key=lambda address: ip_address(address).is_loopback)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--interface", help="print the address of this interface, such as ib0")
    which.add_argument("--host", help="print the address that this host name resolves to")
    options = parser.parse_args()
    try:
        print(of_interface(options.interface) if options.interface else of_host(options.host))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
