"""What ends a run from outside, as the code of the run sees it."""

import psutil

from grpo_megatron.run.stop import StopRequest


class Guard:
    """This one never ends anything: a run that is started from Python belongs to its caller, with all signals. See commands.driver."""

    def __init__(self) -> None:
        self.stop = StopRequest()

    def entered(self, folder: str, grace: float, grace_usr1: float) -> None:
        """The run's folder is there. grace, grace_usr1: seconds, as the configuration has them."""

    def needs(self, processes: list[psutil.Process]) -> None:
        """The run is over when one of these ends, in place of those named before."""
