"""All gloo process groups of a process on one device, which is a thread that waits for their sockets.

torch gives each group a device of its own, and a rank has 18 groups or more. The thread of a device looks around a hundred times a
second, whether or not something comes. On a machine with few processors those of ranks that only waited kept the others from work.
"""

import datetime
import functools
import os

from torch.distributed import distributed_c10d


def share_device() -> None:
    """From now on, all gloo groups that this process makes have one device. It may be called again."""
    groups = distributed_c10d.ProcessGroupGloo
    if not hasattr(groups.__init__, "__wrapped__"):
        # Not a class in its place: torch asks whether groups are instances of this one, also of those that C++ hands back.
        groups.__init__ = _with_shared_devices(groups.__init__)


def _with_shared_devices(initialize):
    @functools.wraps(initialize)
    def __init__(self, store, rank: int, size: int, timeout: datetime.timedelta):
        options = distributed_c10d.ProcessGroupGloo._Options()
        options._devices = _devices(os.environ.get("GLOO_SOCKET_IFNAME", ""))
        options._threads = 2 * len(options._devices)  # torch's own number
        options._timeout = timeout
        initialize(self, store, rank, size, options)

    return __init__


@functools.cache
def _devices(interfaces: str) -> list:
    """As torch would choose them. interfaces: their names, separated by commas, or nothing for the one of the host's name."""
    groups = distributed_c10d.ProcessGroupGloo
    named = [groups.create_device(interface=name) for name in interfaces.split(",") if name]
    return named or [groups.create_default_device()]
