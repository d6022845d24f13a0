"""Interface between a run and the code that ends it from outside."""

from collections.abc import Callable

import psutil

from grpo_megatron.monitoring.status import StatusFile
from grpo_megatron.run.stop import StopRequest


class Guard:
    """A guard that never ends the run. commands.driver has one that does.

    A run that is started from Python belongs to its caller, who also handles all signals.
    """

    def __init__(self) -> None:
        self.stop = StopRequest()
        # of the run, once it has one; for the code that ends the process
        self.status: StatusFile | None = None

    def entered(self, folder: str, grace: float, grace_usr1: float) -> None:
        """Take note that the run's folder exists. grace, grace_usr1: seconds, as configured."""

    def needs(self, find: Callable[[], list[psutil.Process]] | None, port: int | None = None) -> None:
        """Take note of the processes that the run cannot do without. The run is over when one of them ends.

        find: returns these processes; None: the run needs none any more. Without `port`, it may return more
            of them later.
        port: a port on this machine; the run is also over when nothing listens there. `find` then returns all
            of the processes now.
        """
