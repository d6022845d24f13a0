"""PolledCalls: answers and reports of an actor's calls, and calls that get no answer."""

import asyncio
from types import SimpleNamespace

import pytest

from grpo_megatron.cluster.polled_calls import PolledCalls
from grpo_megatron.cluster.processes import Process
from grpo_megatron.cluster.rounds import Report, RoundId, RoundTasks
from grpo_megatron.errors import UserError

ONE, OTHER = RoundId("train", 1), RoundId("evaluate", 1)


def test_reports_come_before_the_answer_of_their_call():
    async def main():
        tasks, heard = RoundTasks(), []

        async def work(item):
            for number in range(3):
                await asyncio.sleep(0.002)
                tasks.report(ONE, Report(item.key, number))
            tasks.report(OTHER, Report(item.key, "of another round"))
            return item

        def calls(*timeout):
            return PolledCalls(
                Process("worker", "log"),
                "sample",
                lambda items: tasks.start(ONE, work, items),
                lambda seconds: asyncio.ensure_future(tasks.poll(ONE, 0.1)),
                *timeout,
            )

        item = SimpleNamespace(key="a")
        assert await calls().call("a", item, heard.append) is item
        assert heard == [0, 1, 2]
        with pytest.raises(UserError, match="1 without an answer"):  # a report is none
            await calls(0.0, lambda waiting: f"{waiting} without an answer").call("a", item, heard.append)
        assert heard == [0, 1, 2, 0]

    asyncio.run(main())


def test_calls_of_a_round_that_the_actor_has_ended_fail():
    """They would wait for ever otherwise."""

    async def over(seconds):
        return None

    async def main():
        calls = PolledCalls(Process("worker", "log"), "sample", lambda items: None, over)
        with pytest.raises(RuntimeError, match="worker has ended the round of 1 calls of `sample`"):
            await calls.call(1, "item")

    asyncio.run(main())


def test_calls_without_an_answer_fail_with_the_callers_message():
    async def main():
        async def never(seconds):
            await asyncio.sleep(0.001)
            return []

        calls = PolledCalls(
            Process("box", "box.log"),
            "open",
            lambda items: None,
            lambda seconds: asyncio.ensure_future(never(seconds)),
            0.02,
            lambda waiting: f"{waiting} lids stay shut",
        )
        found = await asyncio.gather(*(calls.call(key, key) for key in range(2)), return_exceptions=True)
        assert [(type(error), str(error)) for error in found] == [(UserError, "2 lids stay shut")] * 2
        await calls.close()
        with pytest.raises(RuntimeError, match="`open` was called after the end of its round"):
            await calls.call(3, 3)

    asyncio.run(main())
