"""Requests to SGLang of callers that are cancelled: what the engine is told, and when."""

import asyncio
from types import SimpleNamespace

import pytest

from grpo_megatron.sglang.release import EngineControl


class SGLang:
    """Stands in for sglang.Engine and its tokenizer manager.

    A call of async_generate returns when its request is aborted. An abort is lost if the request has not been
    dispatched to the scheduler.
    """

    def __init__(self, dispatches=True):
        self.rid_to_state, self.aborted, self.cancelled = {}, [], []
        self._dispatches, self._ends = dispatches, {}

    async def async_generate(self, rid, **_):
        self.rid_to_state[rid] = SimpleNamespace(dispatched=self._dispatches)
        self._ends[rid] = asyncio.Event()
        try:
            await self._ends[rid].wait()
        except asyncio.CancelledError:
            self.cancelled.append(rid)
            raise
        finally:
            del self.rid_to_state[rid]
        return {"aborted": rid}

    def abort_request(self, rid):
        self.aborted.append(rid)
        if self.rid_to_state[rid].dispatched:
            asyncio.get_running_loop().call_later(0.02, self._ends[rid].set)


def control_of(engine):
    control = EngineControl.__new__(EngineControl)  # without SGLang's own classes
    control._engine = control._manager = engine
    return control


async def cancelled(control, *numbers):
    """Send requests, and cancel those who wait for them."""
    calls = [asyncio.create_task(control.sample(number, [1], {}, None, 0)) for number in numbers]
    await asyncio.sleep(0.001)
    for call in calls:
        call.cancel()
    await asyncio.wait(calls)
    assert all(call.cancelled() for call in calls)


@pytest.mark.parametrize("dispatches", [True, False])
def test_a_request_of_a_cancelled_call_has_ended_when_the_call_ends(dispatches):
    """An abort is of no use before the request has reached the scheduler, so that its call is cancelled."""
    engine = SGLang(dispatches)

    async def main():
        await cancelled(control_of(engine), 1, 10)
        assert engine.rid_to_state == {}

    asyncio.run(main())
    assert len(engine.aborted if dispatches else engine.cancelled) == 2
    assert not (engine.cancelled if dispatches else engine.aborted)


def test_no_id_of_a_request_begins_with_another_id():
    """SGLang's scheduler aborts all requests whose ids begin with the given one."""
    engine = SGLang()
    asyncio.run(cancelled(control_of(engine), 1, 10, 100, 0))
    assert len({*engine.aborted}) == 4
    assert {len(rid) for rid in engine.aborted} == {32}


def test_an_answer_reaches_its_caller():
    engine = SGLang()

    async def main():
        control = control_of(engine)
        call = asyncio.create_task(control.sample(7, [1], {}, None, 0))
        await asyncio.sleep(0.001)
        assert control.abort(7)
        assert (await call)["aborted"].endswith("7")
        assert not control.abort(7)  # it has ended

    asyncio.run(main())
