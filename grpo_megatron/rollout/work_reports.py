"""WorkReports: sends the reports of a rollout worker to the driver, many at a time."""

import asyncio
from collections.abc import Callable

from grpo_megatron.cluster.rounds import RoundId, TaskReport
from grpo_megatron.rollout.engine_loads import WorkReport

# Seconds from the end of a sample until the driver is told, together with others that end meanwhile.
_REPORT_SECONDS = 0.25


class WorkReports:
    """Collects a rollout worker's reports on groups in progress, and sends them to the driver together.

    They are sent at most every _REPORT_SECONDS, because each message to the driver costs as much as dozens of
    reports. Only the newest report on a group is sent.
    """

    def __init__(self, send: Callable[[RoundId, TaskReport], None]):
        """Create an empty collection.

        send: sends one report to the driver, as a message of the round that its group belongs to.
        """
        self._send_to_driver = send
        self._newest: dict[tuple[RoundId, int], WorkReport] = {}
        self._timer: asyncio.TimerHandle | None = None

    def add(self, round: RoundId, key: int, report: WorkReport) -> None:
        """Send a report soon. key: GroupRequest.key of the group's request."""
        self._newest[round, key] = report
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_REPORT_SECONDS, self._send)

    def take(self, round: RoundId, key: int) -> WorkReport | None:
        """Return the report on a group that is not sent yet, and will not be; None if there is none."""
        return self._newest.pop((round, key), None)

    def _send(self) -> None:
        self._timer = None
        for (round, key), report in self._newest.items():
            self._send_to_driver(round, TaskReport(key, report))
        self._newest.clear()
