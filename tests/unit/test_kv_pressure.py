"""The limit of requests that follows the KV cache of an engine."""

import asyncio

import pytest

from grpo_megatron.sglang.kv_pressure import EngineLoad, RequestLimit, next_limit


@pytest.mark.parametrize(
    ("limit", "in_flight", "before", "now", "expected"),
    [
        (64, 64, (40, 24, 1.0), (40, 24, 2.0), 52),  # half as many may wait
        (52, 52, (40, 12, 1.0), (40, 11, 2.0), 46),
        (64, 64, (64, 0, 1.0), (40, 24, 2.0), 64),  # they may just have been sent
        (64, 64, (40, 24, 1.0), (40, 24, 60.0), 64),  # the last observation is old
        (64, 32, (40, 24, 1.0), (40, 24, 2.0), 26),  # another client has as many requests
        (64, 64, (40, 24, 1.0), (64, 0, 2.0), 72),  # an eighth more
        (64, 30, (40, 24, 1.0), (30, 0, 2.0), 72),
        (120, 120, (120, 0, 1.0), (120, 0, 2.0), 128),  # not above the largest one
        (4, 4, (4, 0, 1.0), (4, 0, 2.0), 8),
        (2, 2, (0, 2, 1.0), (0, 5, 2.0), 1),  # never 0
        (20, 60, (40, 20, 1.0), (40, 20, 2.0), 20),  # lowered before; requests that were sent are still there
    ],
)
def test_next_limit(limit, in_flight, before, now, expected):
    assert next_limit(limit, 128, in_flight, EngineLoad(*before), EngineLoad(*now)) == expected


def test_it_settles_where_the_cache_is_full():
    """An engine that can run 40 requests. What else is sent waits in it."""
    limit, before, seen = 128, EngineLoad(), []
    for second in range(1, 41):
        now = EngineLoad(min(limit, 40), max(0, limit - 40), second)
        limit, before = next_limit(limit, 128, limit, before, now), now
        seen.append(limit)
    assert all(36 <= limit <= 50 for limit in seen[10:]), seen


def test_requests_wait_for_the_limit_in_their_order():
    limit, running, done = RequestLimit(3), [], []

    async def request(number: int, end: asyncio.Event) -> None:
        async with limit:
            running.append(number)
            await end.wait()
        done.append(number)

    async def main() -> None:
        ends = [asyncio.Event() for _ in range(8)]
        tasks = [asyncio.create_task(request(*given)) for given in enumerate(ends)]
        await asyncio.sleep(0)
        assert running == [0, 1, 2]
        for now in (0.0, 0.5, 1.0):  # the second one is too early to count
            assert limit.limit == 3
            limit.observe(EngineLoad(1, 2, 100 + now))
        assert limit.limit == 2
        ends[0].set()
        await asyncio.sleep(0.01)
        assert running == [0, 1, 2]
        tasks[3].cancel()  # while it waits
        ends[1].set()
        await asyncio.sleep(0.01)
        assert running == [0, 1, 2, 4]
        limit.observe(EngineLoad(2, 0, 102.0))  # 3 again, which is the most
        await asyncio.sleep(0.01)
        assert running == [0, 1, 2, 4, 5]
        for end in ends:
            end.set()
        await asyncio.wait(tasks)
        assert sorted(done) == [0, 1, 2, 4, 5, 6, 7]
        assert limit.in_flight == 0

    asyncio.run(main())


def test_a_turn_that_is_cancelled_passes_to_the_next():
    """The turn comes, and the request is cancelled before it runs."""
    limit, entered = RequestLimit(1), []

    async def request(number: int) -> None:
        async with limit:
            entered.append(number)

    async def main() -> None:
        await limit.__aenter__()
        tasks = [asyncio.create_task(request(number)) for number in range(2)]
        await asyncio.sleep(0)
        await limit.__aexit__()
        tasks[0].cancel()
        await asyncio.wait(tasks, timeout=5)
        assert entered == [1]

    asyncio.run(main())
