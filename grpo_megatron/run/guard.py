"""What ends a run from outside, as the code of the run sees it."""

from collections.abc import Callable

import psutil

from grpo_megatron.monitoring.status import StatusFile
from grpo_megatron.run.stop import StopRequest


class Guard:
    """This one never ends anything: a run that is started from Python belongs to its caller, with all signals. See commands.driver."""

    def __init__(self) -> None:
        self.stop = StopRequest()
        self.status: StatusFile | None = None  # of the run, once it has one: for who ends the process

    def entered(self, folder: str, grace: float, grace_usr1: float) -> None:
        """The run's folder is there. grace, grace_usr1: seconds, as the configuration has them."""

    def needs(self, find: Callable[[], list[psutil.Process]] | None, port: int | None = None) -> None:
        """From now on the run is over when a process ends that `find` returns; None: none is needed any more. port: on this machine; the
        run is over when nobody listens there, and `find` returns all of them now. Without, it returns more of them later."""
