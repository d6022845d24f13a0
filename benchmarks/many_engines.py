"""Measure what the driver does for a thousand engines that sample beside training.

    python benchmarks/many_engines.py [--engines N] [--requests N] [--groups N] [--steps N] [--seconds S]

The controller, stream of groups, rollout manager, trainer, monitor and ledger are the real ones. So are the
driver's handles of the rollout workers, one for each node of eight engines, and the list of engines that
serve. Engines are simulated: each of the eight samples of a group is done after a random time.
rollout.staleness is so large that each engine has `--requests` samples in progress. Ranks answer immediately,
as in benchmarks/controller.py. `--requests 64 --groups 1024 --seconds 60` has 65,536 samples in progress. It
takes long, because two processes stand in for all rollout workers.

Prints a table and, as its last line, one JSON object:

    step_seconds            CPU seconds of the driver for a step, median; target 3
    admission_microseconds  CPU time to decide when a group starts and on which engine; target 50
    in_progress             samples in progress at the end of a timed step, median
    max_age                 largest age of a sample that was trained on, in weight versions
    bound                   rollout.staleness, which max_age must not exceed
    discarded               groups that were sampled and not trained on, except those that wait at the end
"""

import argparse
import asyncio
import importlib
import json
import math
import random
import statistics
import sys
import tempfile
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import ray

sys.path.insert(0, "")
from benchmarks.controller import GROUP, PROCESSES, PROMPT, InstantSampler, Prompts, Ranks, Traffic, Trainer
from grpo_megatron.algorithm.algorithm import Algorithm
from grpo_megatron.batch.sample import Sample, WeightSpan
from grpo_megatron.batch.schedule import CostModel
from grpo_megatron.cluster.processes import Process
from grpo_megatron.cluster.ray_connection import connect
from grpo_megatron.cluster.rounds import RoundId, RoundTasks
from grpo_megatron.config.load import read_config
from grpo_megatron.config.rollout import Order
from grpo_megatron.config.schema import Config
from grpo_megatron.controller import Controller
from grpo_megatron.monitoring.monitor import Monitor
from grpo_megatron.monitoring.status import StatusFile
from grpo_megatron.monitoring.throughput import Throughput
from grpo_megatron.rollout.engine_loads import EngineLoads, GroupWork, WorkReport
from grpo_megatron.rollout.groups import GroupRequest
from grpo_megatron.rollout.manager import RolloutManager
from grpo_megatron.rollout.played_group import Listener
from grpo_megatron.rollout.slots import GroupSlots
from grpo_megatron.rollout.source import EngineRollouts, Rollout
from grpo_megatron.rollout.statistics import staleness
from grpo_megatron.rollout.work_reports import WorkReports
from grpo_megatron.rollout.worker import RolloutWorker, WorkerProcess
from grpo_megatron.run.loop import StepLoop
from grpo_megatron.samples.ledger import Ledger
from grpo_megatron.sglang.admission import Admission, Closed
from grpo_megatron.sglang.members import Membership

ENGINES_OF_NODE, TOKENS = 8, 512


class SlowSampler(InstantSampler):
    """An InstantSampler whose samples take a random time, on average `seconds`, and are reported one by one.

    The samples have the weight version that was current when their group was requested.
    """

    def __init__(self, seconds: float, limit: int):
        """Create a sampler. limit: number of samples that an engine takes at a time."""
        super().__init__(TOKENS)
        self._seconds, self._limit = seconds, limit

    async def sample(self, round: RoundId, request: GroupRequest, listener: Listener) -> tuple[Sample, ...]:
        seconds = self._seconds * np.random.default_rng(request.group_id).uniform(0.5, 1.5, GROUP)
        now = 0.0
        for number, end in enumerate(sorted(seconds), start=1):
            await asyncio.sleep(end - now)
            now, left = end, GROUP - number
            listener(WorkReport(GroupWork(left, left * TOKENS), self._limit))
        samples = await super().sample(round, request, listener)
        span = WeightSpan(request.weight_version, 0, TOKENS - PROMPT)
        return tuple(replace(sample, weight_spans=(span,)) for sample in samples)


@ray.remote
class Workers:
    """Actor that simulates the processes of many rollout workers, whose engines are simulated, too."""

    def __init__(self, count: int, seconds: float, limit: int):
        # Other processes must find this class under the name of its module, not in __main__.
        sampler = importlib.import_module("benchmarks.many_engines").SlowSampler(seconds, limit)
        self._workers = [self._worker(sampler) for _ in range(count)]

    def _worker(self, sampler: InstantSampler) -> Any:
        kind = WorkerProcess.__ray_metadata__.modified_class
        worker = kind.__new__(kind)
        worker._rounds, worker._sampler = RoundTasks(), sampler
        worker._warnings = SimpleNamespace(take=tuple)
        worker._layers, worker._reports = (), WorkReports(worker._rounds.report)
        return worker

    async def call(self, worker: int, method: str, *arguments: Any) -> Any:
        return await getattr(self._workers[worker], method)(*arguments)


class ActorOfWorker:
    """Stands in for the Ray actor of one rollout worker. Calls go to the Workers actor that simulates it."""

    def __init__(self, workers: ray.actor.ActorHandle, index: int):
        self._workers, self._index = workers, index

    def __getattr__(self, method: str) -> Any:
        call = self._workers.call
        return SimpleNamespace(remote=lambda *given: call.remote(self._index, method, *given))


class WorkerOfNode(RolloutWorker):
    """The driver's handle of the rollout worker of one node."""

    def __init__(self, number: int, actor: ActorOfWorker):
        self.process, self._calls, self._actor = Process(f"rollout worker {number}", ""), {}, actor


class Engines:
    """Stands in for EnginePool. The list of engines that serve is the real one."""

    def __init__(self, count: int):
        self.weight_version, self.end_ids, self.admission = 0, frozenset(), Admission()
        self._membership = Membership([f"engine {index}" for index in range(count)], lambda index: None)
        self.admission.open(Closed.unsynced)

    @property
    def serving(self) -> Mapping[int, int]:
        return self._membership.serving


class Rollouts:
    """Stands in for RolloutPipeline. New weights reach the engines immediately.

    ages: largest age of a sample, in weight versions, for each step
    """

    def __init__(self, source: EngineRollouts, engines: Engines):
        self.metrics, self._source, self._engines = {}, source, engines
        self.ages: list[float] = []  # largest age of a sample of each step

    @property
    def version(self) -> int:
        return self._engines.weight_version

    def take(self, step: int) -> Rollout:
        rollout = self._source.take(step)
        self.ages.append(staleness(rollout.groups, self.version)["staleness/max"])
        return rollout

    def weights_changed(self) -> None:
        with self._source.updating():
            self._engines.weight_version += 1


def admission_seconds(engines: int, requests: int, groups: int, bound: int) -> float:
    """Return the mean CPU seconds per group of the decisions when it starts and on which engine.

    The decisions are made for `bound` + 2 steps outside of a run, because in a run, reading the clock for
    each decision would take longer than the decision.

    engines: number of engines.
    requests: number of samples that an engine takes at a time.
    groups: number of groups of a step.
    bound: rollout.staleness.
    """
    slots = GroupSlots(groups, bound, Order.window)
    slots._ahead, slots._pace = bound * groups, lambda now: None
    loads, serving, draw = EngineLoads(requests), Engines(engines), random.Random(0)
    work = GroupWork(GROUP, GROUP * TOKENS)
    waiting, running, started, begun = deque(), [], 0, time.process_time()
    for step in range(bound + 2):
        slots.ask(step)
        while slots.take(step) is None:
            for _ in range(slots.room()):
                waiting.append((slots.start(started), started))
                started += 1
            while waiting and (engine := loads.best(serving.serving)) is not None:
                running.append(waiting.popleft())
                loads.start(engine, running[-1][1], work)
            index = draw.randrange(len(running))
            running[index], running[-1] = running[-1], running[index]
            slot, key = running.pop()
            slots.finish(slot)
            loads.end(key)
        slots.updated()
    return (time.process_time() - begun) / started


def configured(options: argparse.Namespace) -> tuple[Config, int]:
    """Return (configuration, its rollout.staleness).

    The staleness is so large that each engine has `--requests` samples in progress.
    """
    bound = max(1, options.engines * options.requests // GROUP // options.groups)
    config = read_config(
        None,
        [
            "model.path=m",
            "data.train=d",
            f"rollout.n={GROUP}",
            f"rollout.max_concurrency={options.requests}",
            f"rollout.staleness={bound}",
            "rollout.on_update=continue",
            "rollout.order=window",
            "cluster.placement=separate",
            f"data.train_batch_size={options.groups}",
            f"rollout.max_response_length={TOKENS}",
            f"data.max_prompt_length={PROMPT}",
            f"train.max_tokens_per_micro_batch={TOKENS}",
            "train.old_logprobs=rollout",
            f"train.ppo_mini_batch_size={options.groups}",
            "megatron.data_parallel=32",
            "megatron.tensor_parallel=8",
            "megatron.pipeline_parallel=4",
            f"run.total_steps={10**6}",
        ],
    )
    return replace(config, monitor=replace(config.monitor, samples_every=0)), bound


def measure(options: argparse.Namespace, folder: str) -> dict[str, float]:
    config, bound = configured(options)
    nodes = math.ceil(options.engines / ENGINES_OF_NODE)
    processes = [Workers.remote(nodes, options.seconds, options.requests) for _ in range(PROCESSES)]
    workers = [
        WorkerOfNode(number, ActorOfWorker(processes[number % PROCESSES], number)) for number in range(nodes)
    ]
    samplers = [workers[engine // ENGINES_OF_NODE] for engine in range(options.engines)]
    engines = Engines(options.engines)
    with StatusFile(folder, "run", options.steps) as status:
        throughput = Throughput(CostModel(), config.megatron.data_parallel, engine_devices=1)
        monitor = Monitor(folder, config, status, throughput=throughput)
        monitor.open()
        trainer = Trainer(config, Ranks(32, 8, Traffic()))
        source = EngineRollouts(RolloutManager(engines, samplers), config, Prompts())
        loop, ledger = StepLoop(config, SimpleNamespace(), monitor), Ledger(folder)
        rollouts = Rollouts(source, engines)
        controller = Controller(config, rollouts, trainer, Algorithm(config), monitor, loop, ledger)
        # The slots would adapt to the trainer, which takes no time here.
        source._slots._ahead, source._slots._pace = bound * options.groups, lambda now: None
        seconds, in_progress = [], []
        # After `bound` steps, the engines have all their requests. The steps after that are timed.
        for _ in range(bound + options.steps):
            start = time.process_time()
            controller.train_step(controller.loop.begin_step())
            seconds.append(time.process_time() - start)
            in_progress.append(source._slots.in_progress * GROUP)
        source.close()
        waiting = len(source._slots.items)
        monitor.close()
    return {
        "step_seconds": statistics.median(seconds[bound:]),
        "admission_microseconds": 1e6
        * admission_seconds(options.engines, options.requests, options.groups, bound),
        "in_progress": statistics.median(in_progress[bound:]),
        "max_age": max(rollouts.ages),
        "bound": bound,
        "discarded": source._manager.take_ids(0).start - waiting - len(seconds) * options.groups,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engines", type=int, default=1024, help="simulated engines, eight on each node")
    parser.add_argument("--requests", type=int, default=8, help="samples in progress on each engine")
    parser.add_argument("--groups", type=int, default=512, help="groups of a step")
    parser.add_argument("--steps", type=int, default=2, help="timed steps")
    parser.add_argument("--seconds", type=float, default=10.0, help="mean time of a group")
    options = parser.parse_args()
    connect(None, PROCESSES + 2)
    with tempfile.TemporaryDirectory() as folder:
        found = measure(options, folder)
    for name, value in found.items():
        print(f"{name:<24}{value:>12.4g}")
    print(json.dumps({name: round(value, 4) for name, value in found.items()}))


if __name__ == "__main__":
    main()
