"""One gloo device for all process groups of a process.

A gloo device is a thread that waits for the sockets of its groups. torch gives each group a device of its
own, and a rank has 18 groups or more. The thread of a device wakes up about a hundred times a second, even if
nothing arrives. On a machine with few processors, the threads of ranks that only waited slowed down the other
ranks.
"""

import datetime
import functools
import os

from torch.distributed import distributed_c10d


def share_device() -> None:
    """Make all gloo groups that this process creates from now on share one device, to save CPU time.

    Patches ProcessGroupGloo.__init__ of torch. Calling it again changes nothing.
    """
    groups = distributed_c10d.ProcessGroupGloo
    if not hasattr(groups.__init__, "__wrapped__"):
        # Wrap __init__ rather than replace the class: torch checks whether groups are instances of this
        # class, also for groups that C++ returns.
        groups.__init__ = _with_shared_devices(groups.__init__)


def _with_shared_devices(initialize):
    """Return a replacement for ProcessGroupGloo.__init__, which makes the group use the shared devices.

    initialize: the original ProcessGroupGloo.__init__, which the replacement calls.
    """

    @functools.wraps(initialize)
    def __init__(self, store, rank: int, size: int, timeout: datetime.timedelta):
        options = distributed_c10d.ProcessGroupGloo._Options()
        options._devices = _devices(os.environ.get("GLOO_SOCKET_IFNAME", ""))
        options._threads = 2 * len(options._devices)  # as many as torch has
        options._timeout = timeout
        initialize(self, store, rank, size, options)

    return __init__


@functools.cache
def _devices(interfaces: str) -> list:
    """Create and return the gloo devices that torch would create for a group.

    The cache returns the same devices for all groups, so that they are shared.

    interfaces: value of GLOO_SOCKET_IFNAME, which is names of network interfaces, separated by commas. If it
        is empty, the device uses the interface that the host's name resolves to.
    """
    groups = distributed_c10d.ProcessGroupGloo
    named = [groups.create_device(interface=name) for name in interfaces.split(",") if name]
    return named or [groups.create_default_device()]
