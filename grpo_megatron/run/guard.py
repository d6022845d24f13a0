"""The interface between a run and the code that ends it because of a signal or a lost Ray daemon."""

from collections.abc import Callable

import psutil

from grpo_megatron.monitoring.status import StatusFile
from grpo_megatron.run.stop import StopRequest


class Guard:
    """A guard that never ends the run, for runs that are started from Python. Their caller handles signals.

    The command line uses commands.driver.DriverGuard instead, which ends the run.

    stop: set when the run is asked to stop
    """

    def __init__(self) -> None:
        self.stop = StopRequest()
        # of the run, once it has one; for the code that ends the process
        self.status: StatusFile | None = None

    def entered(self, folder: str, grace: float, grace_usr1: float) -> None:
        """Receive the news that the run has a folder. This class ignores it.

        grace, grace_usr1: seconds that a run may take to stop, from run.grace and run.grace_usr1.
        """

    def needs(self, find: Callable[[], list[psutil.Process]] | None, port: int | None = None) -> None:
        """Receive the processes without which the run cannot go on, which are Ray's daemons. Ignored here.

        A guard that watches them ends the run when one of them ends.
        find: returns the processes; None: the run needs none any more. It is called once if `port` is given,
            and otherwise again and again, because the processes may still be starting.
        port: port of Ray's GCS on this machine; the run is also over when no process listens there.
        """
