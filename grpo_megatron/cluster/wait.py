"""Wait until all nodes of a job have joined its Ray cluster. slurm/train.sbatch uses it before a run starts.

python -m grpo_megatron.cluster.wait --address HOST:PORT --nodes N --timeout SECONDS
"""

import argparse
import os
import re
import socket
import subprocess
import sys
import time

_COUNT = """
import sys
from grpo_megatron.process_tree import end_with_parent
end_with_parent(int(sys.argv[2]))
import ray
ray.init(address=sys.argv[1], logging_level="error", log_to_driver=False)
print("nodes alive:", sum(node["Alive"] for node in ray.nodes()))
"""


def listening(address: str) -> bool:
    """Return True if a server accepts connections at `address` (HOST:PORT)."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), timeout=2):
            return True
    except OSError:
        return False


def alive_nodes(address: str) -> int:
    """Return the number of alive nodes of the Ray cluster at `address` (HOST:PORT); 0 if it does not answer.

    A subprocess counts the nodes, because a failed ray.init cannot be repeated in the same process. The
    kernel kills the subprocess when this process ends, so that it does not outlive the job.
    """
    if not listening(address):
        return 0
    try:
        command = [sys.executable, "-c", _COUNT, address, str(os.getpid())]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except subprocess.TimeoutExpired:
        return 0
    # Ray may also print lines to stdout.
    counted = re.search(r"^nodes alive: (\d+)$", done.stdout, flags=re.MULTILINE)
    return int(counted[1]) if done.returncode == 0 and counted else 0


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--address", required=True, help="address of the Ray cluster, HOST:PORT")
    parser.add_argument("--nodes", type=int, required=True, help="number of nodes to wait for")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds to wait")
    options = parser.parse_args()
    deadline = time.monotonic() + options.timeout
    alive = 0
    while time.monotonic() < deadline:
        alive = alive_nodes(options.address)
        if alive >= options.nodes:
            print(f"Ray at {options.address}: {alive} nodes", flush=True)
            return 0
        time.sleep(0.5)
    print(
        f"error: Ray at {options.address} has only {alive} of {options.nodes} nodes after "
        f"{options.timeout:.0f} s; docs/slurm.md lists possible causes",
        file=sys.stderr,
    )
    return 1


if __name__ == "__main__":
    sys.exit(main())
