"""The interface between a run and the code that stops the run after a signal or the loss of a Ray daemon."""

from collections.abc import Callable

import psutil

from grpo_megatron.monitoring.status import StatusFile
from grpo_megatron.run.stop import StopRequest


class Guard:
    """Interface of an object that watches a run and ends it when needed. This base class never ends the run.

    Runs that are started from Python use this class, because their caller handles signals. The command line
    uses the subclass commands.driver.DriverGuard, which ends the run after a signal, or if a Ray daemon ends.

    stop: tells the run whether it has been asked to stop
    status: status.json of the run, for the code that ends the process; None before the run has a folder
    """

    def __init__(self) -> None:
        self.stop = StopRequest()
        self.status: StatusFile | None = None

    def entered(self, folder: str, grace: float, grace_usr1: float) -> None:
        """Tell the guard which folder the run has, and how long the run may take to stop.

        This class does nothing. A subclass may end the process if the run takes longer.

        folder: the run's folder.
        grace: seconds that the run may take to stop after a signal (run.grace).
        grace_usr1: the same for the signal SIGUSR1 (run.grace_usr1).
        """

    def needs(self, find: Callable[[], list[psutil.Process]] | None, port: int | None = None) -> None:
        """Tell the guard which Ray daemons the run needs, or that it needs none any more.

        This class does nothing. A subclass may end the run when one of the daemons ends.

        find: function that returns the processes of the daemons. If `port` is given, it is called once.
            Otherwise it is called again and again, because the daemons may still be starting. None: the run
            needs no daemon any more.
        port: port of Ray's GCS on this machine. The subclass also ends the run when no process listens on it.
        """
