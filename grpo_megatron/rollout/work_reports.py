"""WorkReports: sends the reports of a rollout worker to the driver, many at a time."""

import asyncio
import time
from collections.abc import Callable

from grpo_megatron.cluster.rounds import RoundId, TaskReport
from grpo_megatron.rollout.engine_loads import WorkReport

# Seconds from a report until it is sent, together with all others of the worker that come meanwhile: a share
# of the mean time from the start of a group to its reports, within limits. An engine has more samples than it
# works on (EngineLoads), which last it for longer than that. With 128 workers, four messages per second from
# each worker took 8 s of the driver's time for a step.
_SHARE, _LEAST_SECONDS, _MOST_SECONDS = 0.05, 0.25, 5.0
# Weight of a new value in the mean.
_NEW = 0.1


class WorkReports:
    """Collects a rollout worker's reports on groups in progress, and sends them to the driver together.

    Only the newest report on a group is sent.
    """

    def __init__(self, send: Callable[[RoundId, TaskReport], None]):
        """Create an empty collection.

        send: sends one report to the driver, as a message of the round that its group belongs to.
        """
        self._send_to_driver = send
        self._newest: dict[tuple[RoundId, int], WorkReport] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._mean_age = 0.0  # seconds

    def add(self, round: RoundId, key: int, begun: float, report: WorkReport) -> None:
        """Keep a group's newest report, and send it soon, together with those of other groups.

        key: GroupRequest.key of the group's request.
        begun: time.monotonic() when the group was started.
        """
        self._mean_age += _NEW * (time.monotonic() - begun - self._mean_age)
        self._newest[round, key] = report
        if self._timer is None:
            seconds = min(max(_SHARE * self._mean_age, _LEAST_SECONDS), _MOST_SECONDS)
            self._timer = asyncio.get_running_loop().call_later(seconds, self._send)

    def take(self, round: RoundId, key: int) -> WorkReport | None:
        """Return the report on a group that is not sent yet, and will not be; None if there is none."""
        return self._newest.pop((round, key), None)

    def _send(self) -> None:
        self._timer = None
        for (round, key), report in self._newest.items():
            self._send_to_driver(round, TaskReport(key, report))
        self._newest.clear()
