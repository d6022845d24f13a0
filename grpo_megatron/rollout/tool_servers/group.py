"""Run a command in this process's group, and kill the group when the parent of this process ends.

python group.py PARENT_PID COMMAND...

stdin and stdout are the command's. The exit status is that of the command. This file imports only the
standard library, because each MCP server has such a process.
"""

import ctypes
import os
import signal
import subprocess
import sys

_PR_SET_PDEATHSIG = 1


def main() -> int:
    parent, command = int(sys.argv[1]), sys.argv[2:]
    signal.signal(signal.SIGHUP, lambda *_: os.killpg(0, signal.SIGKILL))
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGHUP)
    if os.getppid() != parent:
        return 1
    try:
        child = subprocess.Popen(command)
    except OSError as error:
        print(f"cannot start: {error}", file=sys.stderr)
        return 127
    # The group gets this signal to end. The command may need some time for that.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    # The other ends must notice when the command closes its pipes.
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    status = child.wait()
    os.killpg(0, signal.SIGTERM)  # processes that the command has left behind
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    sys.exit(main())
