"""RolloutManager: generates groups of scored samples from prompts."""

import asyncio
import threading
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from grpo_megatron.batch.prompt import Prompt
from grpo_megatron.batch.sample import Group
from grpo_megatron.cluster.concurrency import together
from grpo_megatron.config.rollout import RolloutConfig
from grpo_megatron.rollout.group_round import GroupRound, Sampler
from grpo_megatron.rollout.groups import Caller, Round
from grpo_megatron.rollout.recording.arrays import RecordedArrays, RecordedHandles
from grpo_megatron.sglang.held import HeldEngines
from grpo_megatron.sglang.pool import EnginePool

T = TypeVar("T")


class RolloutManager:
    """Generates samples on all engines concurrently, scores them, and groups them by prompt.

    Groups are sampled in rounds. A round is a set of groups that are sampled concurrently. When it has ended,
    no worker or engine works on its groups any more. Several threads may use a manager at the same time, each
    for another purpose (Caller), such as training and evaluation.
    """

    def __init__(self, engines: EnginePool | HeldEngines, samplers: Sequence[Sampler]):
        """Create a manager, which numbers its groups from 0.

        engines: the engines that generate the turns of the model.
        samplers: for each engine, the sampler that sends requests to it. Engines of one node share a sampler.
        """
        self._engines, self._samplers = engines, samplers
        self._next_group, self._lock = 0, threading.Lock()
        # For each caller, the attribute `limits` of its EngineLoads.
        self._limits: defaultdict[Caller, dict[int, int]] = defaultdict(dict)
        # The calls of `generate` in progress.
        self._calls: dict[asyncio.Task, asyncio.AbstractEventLoop] = {}
        self._is_aborted = False

    @property
    def num_serving(self) -> int:
        """Number of engines that get requests."""
        return len(self._engines.serving)

    def generate(
        self, prompts: list[Prompt], rollout: RolloutConfig, caller: Caller = Caller.train
    ) -> list[Group]:
        """Generate and score `rollout.n` samples for each prompt. Return groups in the order of the prompts.

        rollout: settings such as the number of samples and the temperature.
        caller: what the samples are for. In evaluations, an environment's initial state depends only on the
            prompt, so that evaluations at different steps are comparable.

        With reward.on_failure=leave_out, failed samples are left out of their group, which may become empty.

        Raises ProcessLost, a UserError, if the last engine dies, or if a third engine dies with the same
        group. Raises UserError if an engine finishes no request for rollout.engine.request_timeout seconds,
        if the engines cannot generate now, for example because their weights are being updated, or if
        `caller` has a round in progress. Raises the errors of rewards and environments. Raises CancelledError
        after `abort`.
        """

        async def sampled() -> list[Group]:
            task = asyncio.current_task()
            with self._lock:
                if self._is_aborted:
                    raise asyncio.CancelledError
                self._calls[task] = asyncio.get_running_loop()
            try:
                async with self.round(caller, rollout) as round:
                    ids = self.take_ids(len(prompts))
                    return await together(map(round.start, prompts, ids))
            finally:
                with self._lock:
                    del self._calls[task]

        return _run(sampled())

    def abort(self) -> None:
        """Cancel the calls of `generate` in other threads.

        The cancelled calls, and all later calls of `generate`, raise CancelledError.
        """
        with self._lock:
            self._is_aborted = True
            for task, loop in self._calls.items():
                loop.call_soon_threadsafe(task.cancel)

    @asynccontextmanager
    async def round(
        self,
        caller: Caller,
        rollout: RolloutConfig,
        over_updates: bool = False,
        outlives_engines: bool = False,
    ) -> AsyncIterator[GroupRound]:
        """Open a round, in which groups are sampled concurrently, and yield it. The context ends the round.

        When the context has ended, no worker or engine works on the round's groups any more.

        caller: what the samples are for.
        rollout: settings of the sampling.
        over_updates: True to allow weight updates during the round.
        outlives_engines: True if groups wait until an engine serves again after all engines have been lost.
            Another thread has to sync the weights meanwhile. False: the loss of all engines is an error.

        Raises UserError if the engines cannot generate now, for example because their weights are being
        updated, or if `caller` has a round in progress.
        """
        engines = self._engines
        with engines.admission.round(caller.value, over_updates) as id:
            # After the loss of all engines, the update that makes one serve again is within the round.
            round = Round(id, rollout, engines.end_ids, over_updates or outlives_engines)
            limits = self._limits[caller]
            async with GroupRound(round, engines, self._samplers, limits, outlives_engines) as begun:
                yield begun

    def write_samples(self, groups: list[Group], path_of: Callable[[int], Path]) -> list[Group]:
        """Have the samplers write the arrays and texts of groups to files of a recording.

        Return copies of the groups, in which the handle of each sample's arrays refers to these files. Raises
        OSError if a file cannot be written.

        path_of: function that returns the path of a sampler's file. Its argument is the sampler's index.
        """
        handles: dict[Sampler, list[RecordedHandles]] = {sampler: [] for sampler in self._samplers}
        paths = {sampler: path_of(index) for index, sampler in enumerate(handles)}
        recorded = []
        for group in groups:
            sampler = self._samplers[group.engine]
            file, first = str(paths[sampler]), len(handles[sampler])
            samples = (
                replace(sample, handle=RecordedArrays(file, first + index))
                for index, sample in enumerate(group.samples)
            )
            recorded.append(replace(group, samples=tuple(samples)))
            handles[sampler] += [(sample.handle, sample.texts) for sample in group.samples]

        async def write() -> list[OSError | None]:
            return await asyncio.gather(
                *(sampler.write_samples(paths[sampler], own) for sampler, own in handles.items() if own)
            )

        for error in _run(write()):
            if error is not None:
                raise error
        return recorded

    def take_ids(self, count: int) -> range:
        """Reserve `count` consecutive ids for groups, and return them. Each id is returned only once."""
        with self._lock:
            first = self._next_group
            self._next_group += count
        return range(first, first + count)

    def state_dict(self) -> dict:
        """Return {"next_group": id of the next group}, for checkpoints."""
        return {"next_group": self._next_group}

    def load_state_dict(self, state: dict) -> None:
        self._next_group = state["next_group"]


def _run(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine in a new event loop, and return its result.

    asyncio.run formats the result of the coroutine that it gets as text. This takes milliseconds for some
    hundred samples. So asyncio.run gets a coroutine that returns nothing, and the result is stored elsewhere.
    """
    results = []

    async def main() -> None:
        results.append(await coroutine)

    asyncio.run(main())
    return results[0]
