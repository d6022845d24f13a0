"""PolledCalls: answers and reports of an actor's calls, and calls that get no answer."""

import asyncio
from types import SimpleNamespace

import pytest

from grpo_megatron.cluster.polled_calls import PolledCalls
from grpo_megatron.cluster.processes import Process
from grpo_megatron.cluster.rounds import RoundId, RoundTasks, TaskReport
from grpo_megatron.errors import ProcessLost, UserError

ONE, OTHER = RoundId("train", 1), RoundId("evaluate", 1)


def test_reports_come_before_the_answer_of_their_call():
    async def main():
        tasks, heard = RoundTasks(), []

        async def work(item):
            for number in range(3):
                await asyncio.sleep(0.002)
                tasks.report(ONE, TaskReport(item.key, number))
            tasks.report(OTHER, TaskReport(item.key, "of another round"))
            return item

        def calls():
            return PolledCalls(
                Process("worker", "log"),
                "sample",
                lambda items: tasks.start(ONE, work, items),
                lambda seconds: asyncio.ensure_future(tasks.poll(ONE, 0.1)),
            )

        item = SimpleNamespace(key="a")
        assert await calls().call("a", item, heard.append) is item
        assert heard == [0, 1, 2]

    asyncio.run(main())


def test_a_report_is_no_answer():
    async def main():
        heard = []

        async def poll():
            await asyncio.sleep(0.002)
            return [TaskReport("a", 0)]

        calls = PolledCalls(
            Process("worker", "log"),
            "sample",
            lambda items: None,
            lambda seconds: asyncio.ensure_future(poll()),
            0.05,
            lambda waiting: f"{waiting} without an answer",
        )
        with pytest.raises(UserError, match="1 without an answer"):
            await calls.call("a", "item", heard.append)
        assert len(heard) > 2

    asyncio.run(main())


def test_nothing_of_a_lost_actor_is_heard_later():
    """A poll failed, but the actor lived. Its reports would get into a response that goes on elsewhere."""

    async def main():
        heard, answers = [], [ProcessLost("planted"), [TaskReport("a", 0)]]

        async def poll():
            await asyncio.sleep(0.001)
            answer = answers.pop(0)
            if isinstance(answer, Exception):
                raise answer
            return answer

        calls = PolledCalls(
            Process("worker", "log"),
            "sample",
            lambda items: None,
            lambda seconds: asyncio.ensure_future(poll()),
        )
        for key in "ab":
            with pytest.raises(ProcessLost, match="planted"):
                await calls.call(key, "item", heard.append)
        assert (heard, len(answers)) == ([], 1)

    asyncio.run(main())


def test_reports_and_answers_of_cancelled_calls_are_dropped():
    async def main():
        heard, b = [], SimpleNamespace(key="b")
        answers = [[], [TaskReport("a", 0), SimpleNamespace(key="a"), TaskReport("b", 1), b]]

        async def poll():
            await asyncio.sleep(0.005)
            return answers.pop(0)

        calls = PolledCalls(
            Process("worker", "log"),
            "sample",
            lambda items: None,
            lambda seconds: asyncio.ensure_future(poll()),
        )
        first = asyncio.create_task(calls.call("a", "item", heard.append))
        second = asyncio.create_task(calls.call("b", "item", heard.append))
        await asyncio.sleep(0.001)
        first.cancel()
        assert await second is b
        assert heard == [1]

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
