"""The interface between a run and the code that ends the run after a signal or the loss of a Ray daemon."""

from collections.abc import Callable

import psutil

from grpo_megatron.monitoring.status import StatusFile
from grpo_megatron.run.stop import StopRequest


class Guard:
    """A guard that never ends the run, for runs that are started from Python. Their caller handles signals.

    The command line uses the subclass commands.driver.DriverGuard, which ends the run after a signal, or if a
    Ray daemon ends.

    stop: tells the run that it has been asked to stop
    status: status.json of the run, for the code that ends the process; None before the run has a folder
    """

    def __init__(self) -> None:
        self.stop = StopRequest()
        # of the run, once it has one; for the code that ends the process
        self.status: StatusFile | None = None

    def entered(self, folder: str, grace: float, grace_usr1: float) -> None:
        """Tell the guard that the run has a folder. This class does nothing.

        folder: the run's folder.
        grace, grace_usr1: seconds that the run may take to stop, from run.grace and run.grace_usr1.
        """

    def needs(self, find: Callable[[], list[psutil.Process]] | None, port: int | None = None) -> None:
        """Tell the guard which processes the run needs: Ray's daemons. This class does nothing.

        A guard that watches the processes ends the run when one of them ends.
        find: returns the processes. It is called once if `port` is given. Otherwise it is called again and
            again, because the processes may still be starting. If None, the run needs no processes any more.
        port: port of Ray's GCS on this machine. The guard also ends the run when no process listens there.
        """
