"""The reports of a rollout worker on groups in progress."""

import asyncio
import time

import pytest

from grpo_megatron.cluster.rounds import RoundId, TaskReport
from grpo_megatron.rollout import work_reports
from grpo_megatron.rollout.engine_loads import GroupWork, WorkReport

ROUND = RoundId("train", 1)


def report(samples: int) -> WorkReport:
    return WorkReport(GroupWork(samples, samples * 10), 256)


def test_the_newest_reports_of_all_groups_are_sent_together(monkeypatch):
    monkeypatch.setattr(work_reports, "_LEAST_SECONDS", 0.02)
    sent = []

    async def main():
        reports = work_reports.WorkReports(lambda round, one: sent.append((round, one)))
        now = time.monotonic()
        for key, samples in ((1, 3), (2, 3), (1, 2), (3, 1)):
            reports.add(ROUND, key, now, report(samples))
        assert reports.take(ROUND, 3) == report(1)  # the group is finished
        assert reports.take(ROUND, 4) is None
        assert not sent
        await asyncio.sleep(0.1)
        assert sent == [(ROUND, TaskReport(1, report(2))), (ROUND, TaskReport(2, report(3)))]
        reports.add(ROUND, 1, now, report(1))
        await asyncio.sleep(0.1)
        assert len(sent) == 3

    asyncio.run(main())


@pytest.mark.parametrize(("age", "seconds"), [(0.5, 0.25), (60.0, 3.0), (600.0, 5.0)])
def test_reports_on_long_samples_are_sent_more_rarely(age, seconds):
    async def main():
        reports = work_reports.WorkReports(lambda round, one: None)
        for _ in range(100):
            if reports._timer:
                reports._timer.cancel()
                reports._timer = None
            reports.add(ROUND, 1, time.monotonic() - age, report(1))
        assert reports._timer.when() - asyncio.get_running_loop().time() == pytest.approx(seconds, rel=0.05)

    asyncio.run(main())
