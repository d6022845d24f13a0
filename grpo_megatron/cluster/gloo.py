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
    """Make the gloo process groups that this process creates later share gloo devices, to save CPU time.

    A gloo device is a thread that waits for the sockets of its groups. torch would give each group a device
    of its own. This function patches torch's ProcessGroupGloo.__init__. A second call changes nothing.
    """
    groups = distributed_c10d.ProcessGroupGloo
    if not hasattr(groups.__init__, "__wrapped__"):
        # Wrap __init__ rather than replace the class: torch checks whether groups are instances of this
        # class, also for groups that C++ returns.
        groups.__init__ = _with_shared_devices(groups.__init__)


def _with_shared_devices(initialize):
    """Return a replacement for ProcessGroupGloo.__init__, which makes each new group use the shared devices.

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
    """Return the gloo devices of this process, one for each network interface.

    The first call creates the devices. Later calls return the same devices from the cache.

    interfaces: value of GLOO_SOCKET_IFNAME: names of network interfaces, separated by commas. If it is empty,
        one device uses the interface that the host's name resolves to.
    """
    groups = distributed_c10d.ProcessGroupGloo
    named = [groups.create_device(interface=name) for name in interfaces.split(",") if name]
    return named or [groups.create_default_device()]
