"""Rollout workers: one process on each node with engines, which samples and scores the groups of its engines.

The arrays of the samples stay on the node, in Ray's object store. The driver gets samples whose handles say
where the arrays are. The trainer's ranks fetch them from there.
"""

import asyncio
import contextlib
import gc
import logging
import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from grpo_megatron.batch.sample import Sample
from grpo_megatron.cluster.hang_detector import HangDetector
from grpo_megatron.cluster.heartbeat import Heartbeat
from grpo_megatron.cluster.placement import Cluster
from grpo_megatron.cluster.polled_calls import PolledCalls
from grpo_megatron.cluster.pool_worker import Place
from grpo_megatron.cluster.processes import Process, fetched, gather, redirect_output, use_folder
from grpo_megatron.cluster.rounds import RoundId, RoundTasks, TaskReport
from grpo_megatron.cluster.worker_pool import worker_places
from grpo_megatron.config.schema import Config
from grpo_megatron.errors import UserError
from grpo_megatron.rewards.base import read_secrets, resolve_rewards
from grpo_megatron.rollout.engine_loads import GroupWork, WorkReport
from grpo_megatron.rollout.environments import asks_reward_function, offered_tools
from grpo_megatron.rollout.groups import EngineLost, GroupRequest, GroupSampler, Round
from grpo_megatron.rollout.recording.arrays import RecordedHandles, write_samples
from grpo_megatron.rollout.sample_store import RoutedLayers, routed_layers, store_samples
from grpo_megatron.rollout.sampler_spec import SamplerSpec
from grpo_megatron.rollout.tool_servers.settings import server_variables
from grpo_megatron.rollout.work_reports import WorkReports
from grpo_megatron.sglang.client import EngineConnection
from grpo_megatron.sglang.pool import EnginePool

logger = logging.getLogger(__name__)

# Maximum seconds in which a healthy worker closes its reward and environment workers.
_CLOSE_SECONDS = 10.0
# Interval at which the driver asks a worker for warnings during a round, in which no group may ever be done.
_WARNING_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class SampledGroup:
    """The answer of a rollout worker to a GroupRequest, which asks it to sample one group."""

    key: int
    """GroupRequest.key."""
    samples: tuple[Sample, ...]
    """The scored samples. Their arrays, texts and conversations are in the object store."""
    messages: tuple[str, ...]
    """Warnings that the worker has logged since its last answer."""
    lost: str = ""
    """Message of EngineLost, if the engine has died. The group then has no samples."""
    limit: int = 0
    """WorkReport.limit of the engine, if the driver has not been told of it; else 0."""

    def __reduce__(self):
        # A dataclass would pickle the names of its fields too, for every group.
        return SampledGroup, (self.key, self.samples, self.messages, self.lost, self.limit)


class _Collected(logging.Handler):
    """Logging handler that keeps the texts of warnings until `take`, so that the driver can show them."""

    def __init__(self):
        super().__init__(logging.WARNING)
        self._messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self._messages.append(record.getMessage())

    def take(self) -> tuple[str, ...]:
        taken, self._messages = tuple(self._messages), []
        return taken


@ray.remote
class WorkerProcess:
    """The Ray actor of a rollout worker, a process that samples and scores the groups of one node's engines.

    The driver calls the actor through its handle, a RolloutWorker.
    """

    def __init__(self, process: Process, layers: RoutedLayers = ()):
        """Prepare the process of a rollout worker. `start` then builds the sampler.

        process: name and log file of this process.
        layers: for each pipeline stage, its layers with experts, by which the MoE routing of samples is
            divided; () if it is not divided. sample_store.routed_layers returns this value.
        """
        redirect_output(process.log)
        self._layers = layers
        self._heartbeat = Heartbeat()
        self._heartbeat.role = process.name
        self._heartbeat.start()
        self._warnings = _Collected()
        logging.getLogger("grpo_megatron").addHandler(self._warnings)
        self._rounds = RoundTasks()
        self._reports = WorkReports(self._rounds.report)

    async def start(self, build: Callable[[], GroupSampler], folder: str) -> None:
        """Build the sampler. The driver calls this method once.

        build: function that returns the sampler, or a SamplerSpec, which can be called in the same way.
        folder: the driver's working directory, which may contain the user's modules. It becomes the working
            directory of this process.
        """
        use_folder(folder)
        self._sampler = build()
        # A garbage collection looked at all imported objects for 0.4 s, and all episodes and agents waited.
        gc.freeze()

    async def begin(self, round: Round) -> None:
        """Prepare the sampler for a round. Do nothing if the round has ended."""
        if self._rounds.is_open(round.id):  # an interrupted round may have ended before this call arrives
            await self._sampler.begin(round)

    async def submit(self, round: RoundId, requests: list[GroupRequest]) -> None:
        """Start to sample groups. `poll` returns them later. Do nothing if the round has ended."""
        self._rounds.start(round, partial(self._sample, round), requests)

    async def _sample(self, round: RoundId, request: GroupRequest) -> SampledGroup:
        listener = partial(self._reports.add, round, request.key, time.monotonic())
        try:
            samples = await self._sampler.sample(round, request, listener)
        except EngineLost as error:
            # Returned as an answer, because an error would end the round for all engines of this node.
            return SampledGroup(request.key, (), self._warnings.take(), str(error))
        finally:
            report = self._reports.take(round, request.key)
        stored = store_samples(samples, self._layers)
        return SampledGroup(request.key, stored, self._warnings.take(), limit=report.limit if report else 0)

    async def poll(self, round: RoundId, seconds: float) -> list[SampledGroup | TaskReport] | None:
        """Return the groups of a round that have been done since the last call, and reports on other groups.

        The reports are WorkReports. The list is empty if nothing happens in time. The result is None if the
        round has ended. If a group failed, its error is raised.

        seconds: maximum time to wait for the first group or report.
        """
        return await self._rounds.poll(round, seconds)

    async def end(self, round: RoundId) -> None:
        """End a round: cancel its groups, and end their requests on the engines. Other rounds go on."""
        await self._rounds.end(round)
        await self._sampler.end(round)

    async def connect(self, engine: int, connection: EngineConnection) -> None:
        self._sampler.connect(engine, connection)

    async def warnings(self) -> tuple[str, ...]:
        """Return the texts of warnings that no answer (SampledGroup) has carried to the driver yet.

        The driver asks for them when a round ends.
        """
        return self._warnings.take()

    async def write_samples(self, path: Path, handles: Sequence[RecordedHandles]) -> OSError | None:
        # In a thread, because groups may be sampled meanwhile.
        return await asyncio.to_thread(write_samples, path, handles)

    async def beat(self) -> None:
        """Send a heartbeat to the driver's hang detector now, ahead of the regular interval."""
        self._heartbeat.beat()

    async def close(self) -> None:
        self._sampler.close()


class RolloutWorker:
    """The driver's handle of a rollout worker: it starts the process, and sends it requests for groups.

    It has the interface group_round.Sampler.
    """

    def __init__(
        self, place: Place, spec: SamplerSpec, hang_detector: HangDetector, layers: RoutedLayers = ()
    ):
        """Start the process of a rollout worker, and return before it is ready.

        The caller must wait for the attribute `started`, Ray's reference to the call that builds the sampler.

        place: node, name and log of the process.
        spec: builds the sampler in the process.
        hang_detector: notices if the process sends no heartbeats.
        layers: for each pipeline stage, its layers with experts, by which the MoE routing of samples is
            divided; () if it is not divided. sample_store.routed_layers returns this value.
        """
        self.process = place.process
        self._calls: dict[RoundId, PolledCalls] = {}
        self._showing: dict[RoundId, asyncio.Task] = {}
        where = NodeAffinitySchedulingStrategy(place.node, soft=False)
        self._actor = WorkerProcess.options(num_cpus=0, scheduling_strategy=where).remote(
            place.process, layers
        )
        self._hang_detector = hang_detector
        hang_detector.add(place.process, self._actor)
        self.started = self._actor.start.remote(spec, os.getcwd())

    async def begin(self, round: Round) -> None:
        id, actor = round.id, self._actor
        self._calls[id] = PolledCalls(
            self.process,
            "sample",
            lambda requests: actor.submit.remote(id, requests),
            lambda seconds: actor.poll.remote(id, seconds),
        )
        await fetched(actor.begin.remote(round), self.process, "begin")
        self._showing[id] = asyncio.create_task(self._show_warnings())

    async def _show_warnings(self) -> None:
        """Show the worker's warnings from time to time. Errors end this; other calls raise them too."""
        with contextlib.suppress(UserError, ray.exceptions.RayError):
            while True:
                await asyncio.sleep(_WARNING_SECONDS)
                _show(await fetched(self._actor.warnings.remote(), self.process, "warnings"))

    async def sample(
        self, round: RoundId, request: GroupRequest, listener: Callable[[WorkReport], None]
    ) -> tuple[Sample, ...]:
        answer = await self._calls[round].call(request.key, request, listener)
        _show(answer.messages)
        if answer.limit:
            listener(WorkReport(GroupWork(0, 0), answer.limit))
        if answer.lost:
            raise EngineLost(answer.lost)
        return answer.samples

    async def end(self, round: RoundId) -> None:
        if showing := self._showing.pop(round, None):
            showing.cancel()
        if calls := self._calls.pop(round, None):
            await calls.close()
        try:
            await fetched(self._actor.end.remote(round), self.process, "end")
        finally:
            _show(await fetched(self._actor.warnings.remote(), self.process, "warnings"))

    async def write_samples(self, path: Path, handles: Sequence[RecordedHandles]) -> OSError | None:
        return await fetched(self._actor.write_samples.remote(path, handles), self.process, "write_samples")

    def connect(self, engine: int, connection: EngineConnection) -> ray.ObjectRef:
        """Have the worker send later requests for an engine over a new connection.

        This is necessary when a new process has replaced the engine's process, or when an engine has joined.

        engine: index of the engine.

        Returns Ray's reference to the call, which has no result.
        """
        return self._actor.connect.remote(engine, connection)

    def close(self) -> None:
        """End the worker's process, and the reward and environment processes that it has started."""
        self._hang_detector.remove(self._actor)
        with contextlib.suppress(ray.exceptions.RayError, TimeoutError):
            ray.get(self._actor.close.remote(), timeout=_CLOSE_SECONDS)
        ray.kill(self._actor)


def _show(warnings: Iterable[str]) -> None:
    for text in warnings:
        logger.warning(text)


class RolloutWorkers:
    """The rollout workers of a run: one process per node with engines, which samples groups on these engines.

    samplers: for each engine, the worker of the engine's node. Engines that join the run after its start are
        assigned to all workers in turn.
    """

    def __init__(
        self,
        config: Config,
        cluster: Cluster,
        engines: EnginePool,
        log_dir: str,
        hang_detector: HangDetector,
    ):
        """Start all rollout workers and return immediately. `wait_until_ready` waits for them.

        `engines.joined` is set, so that the workers learn of engines that join the run or are started again.

        log_dir: folder of the log files of the workers, and of the processes that the workers start.

        Raises UserError if a reward function is unknown, if a tool cannot be used, or if one of them needs an
        environment variable that is not set.
        """
        asks = asks_reward_function(config.rollout, config.reward)
        secrets = read_secrets(resolve_rewards(config.reward)) if asks else {}
        secrets |= server_variables(config.rollout, config.reward)
        tools = offered_tools(config.rollout, config.reward)
        self._timeout = config.rollout.engine.start_timeout
        node_of = [nodes[0][0].node for nodes in cluster.engine_nodes]  # of each engine
        own = list(dict.fromkeys(node_of))
        places = {
            role: worker_places(cluster.nodes, config.reward.workers, log_dir, role)
            for role in ("reward", "environment")
        }
        connections, layers = dict(enumerate(engines.connections())), routed_layers(config)
        self._workers = {}
        for number, node in enumerate(own):
            spec = SamplerSpec(
                config,
                connections,
                {role: _share(found, own, number) for role, found in places.items()},
                secrets,
                tools,
            )
            process = Process(f"rollout worker {number}", f"{log_dir}/rollout_worker{number}.log")
            self._workers[node] = RolloutWorker(Place(process, node), spec, hang_detector, layers)
        self.samplers = [self._workers[node] for node in node_of]
        self._have_samplers(len(connections))
        engines.joined = self._connect
        self._engines = engines

    def _have_samplers(self, count: int) -> None:
        """Assign a worker to each engine that has none. The workers take turns.

        Such an engine has joined the run after its start.

        count: number of all engines.
        """
        workers = list(self._workers.values())
        for engine in range(len(self.samplers), count):
            self.samplers.append(workers[engine % len(workers)])

    def wait_until_ready(self) -> None:
        """Wait until all workers have started.

        Raises ProcessLost if a worker dies or takes longer than rollout.engine.start_timeout. Raises the
        error of a worker that fails.
        """
        workers = list(self._workers.values())
        calls = {index: worker.started for index, worker in enumerate(workers)}
        gather(calls, [worker.process for worker in workers], "start", self._timeout)

    def _connect(self, engine: int) -> None:
        self._have_samplers(engine + 1)
        connection = self._engines.connections()[engine]
        workers = list(self._workers.values())
        calls = {index: worker.connect(engine, connection) for index, worker in enumerate(workers)}
        gather(calls, [worker.process for worker in workers], "connect")

    def close(self) -> None:
        for worker in self._workers.values():
            worker.close()


def _share(places: Sequence[Place], nodes: Sequence[str], number: int) -> list[Place]:
    """Return the places of the reward or environment processes that one rollout worker starts.

    A rollout worker starts all such processes of its own node. The processes of nodes without a rollout
    worker are divided among all rollout workers.

    places: the places of all processes of this role in the run.
    nodes: the node of each rollout worker.
    number: index of the rollout worker's node in `nodes`.
    """
    found = [place for place in places if place.node == nodes[number]]
    others = [place for place in places if place.node not in nodes]
    return found + others[number :: len(nodes)]
