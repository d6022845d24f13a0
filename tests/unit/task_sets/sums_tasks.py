"""A task set of verifiers for tests, which has no model of its own and needs no data."""

import asyncio
import os

import verifiers.v1 as vf


class SumData(vf.TaskData):
    answer: str


class SumTask(vf.Task[SumData]):
    """A sum. An answer of `wait` makes its reward wait, and one of `die` ends the server."""

    @vf.reward(weight=2.0)
    async def right(self, trace) -> float:
        if trace.last_reply == "wait":
            await asyncio.sleep(100)
        if trace.last_reply == "die":
            os._exit(7)
        if trace.last_reply == "fail":
            raise ValueError("planted")
        return float(self.data.answer in trace.last_reply)

    @vf.metric
    async def letters(self, trace) -> float:
        return float(len(trace.last_reply))


class SumTaskset(vf.Taskset[SumTask]):
    def load(self):
        for a in range(3):
            yield SumTask(SumData(prompt=f"{a}+1=", answer=str(a + 1)), self.config.task)


__all__ = ["SumTaskset"]
