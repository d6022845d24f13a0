"""EnginePool starts, queries, updates and closes all SGLang engines of a run."""

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping

import numpy as np
import ray

from grpo_megatron.cluster.hang_detector import HangDetector
from grpo_megatron.cluster.placement import Cluster, RequestedEngine, Slot, by_node
from grpo_megatron.cluster.processes import Process, fetch, gather
from grpo_megatron.config.derived import most_engines
from grpo_megatron.config.lora import LoraConfig
from grpo_megatron.config.rollout import OnUpdate, RolloutConfig
from grpo_megatron.config.schema import ModelConfig
from grpo_megatron.errors import ProcessLost, UserError
from grpo_megatron.sglang.actors import EngineActors
from grpo_megatron.sglang.admission import Admission, Closed
from grpo_megatron.sglang.client import EngineConnection
from grpo_megatron.sglang.further import FurtherEngines
from grpo_megatron.sglang.members import Membership
from grpo_megatron.sglang.memory import MemoryPart
from grpo_megatron.weights.sync.messages import SyncCommand

logger = logging.getLogger(__name__)

# Seconds between two looks at whether an engine has come back.
_PAUSE_SECONDS = 0.2


class EnginePool:
    """The SGLang engines of a run. All serve the same weights, except for engines held for an evaluation.

    An engine that dies or has wrong weights is started again, and serves after the next weight update. The
    other engines go on. If the engines share their devices with the trainer, `lost` raises an error instead.

    admission: admits rounds (batches of requests), unless weights are updated or memory is released.
    weight_version: version of the weights that the last sync sent; 0 before the first sync.
    membership: tells which engines serve requests, and which ones take part in weight updates.
    end_ids: ids of the tokens that end a response. Empty before `wait_until_ready`.
    joined: called with the index of an engine that has been started again and has the newest weights, before
        it gets requests.
    """

    def __init__(
        self,
        cluster: Cluster,
        config: RolloutConfig,
        model: ModelConfig,
        seed: int,
        log_dir: str,
        hang_detector: HangDetector,
        routing: bool = False,
        shared: bool = False,
        stops: bool = False,
        lora: LoraConfig | None = None,
    ):
        """Start all engines and return immediately. `wait_until_ready` waits for them.

        seed: random seed of engine 0; engine i gets seed + i.
        log_dir: folder of the engines' log files.
        hang_detector: monitors the heartbeats of all engines.
        routing: True to report, in completions, the experts (MoE) that each token was routed to.
        shared: True if the engines share their devices with the trainer, and must be able to release memory.
        stops: True if requests may have stop strings, even if rollout.stop is empty.
        lora: settings of the adapter that the engines serve. None: they serve merged weights.
        """
        self._config, self._hang_detector = config, hang_detector
        self.admission, self.weight_version = Admission(), 0
        self._released: set[MemoryPart] = set()
        self._shared, self._starting, self._is_closed = shared, threading.Lock(), False
        self.joined: Callable[[int], None] = lambda index: None
        self.end_ids: frozenset[int] = frozenset()
        self._nodes = [tuple(slot.node for slot in slots) for slots in cluster.engine_slots]
        self._num_first = len(self._nodes)  # number of engines at the start of the run
        switches = (routing, shared, stops, lora)
        self._actors = EngineActors(cluster, config, model, seed, log_dir, hang_detector, *switches)
        self._engines, self._processes = self._actors.engines, self._actors.processes
        self.membership = self._all_serve()
        self._updating: dict[int, int] = {}  # the engines of the update in progress, as in `serving`
        self._updated_actors: dict[int, ray.actor.ActorHandle] = {}  # of these engines
        self._announced: dict[int, int] = {}  # those for which `joined` was called last, as in `serving`
        every = range(self._num_first)
        self._actors.start(every, self._actors.addresses(every))
        # {index: reservation of its devices} of the engines that have joined and have not been given up.
        self._reserved: dict[int, RequestedEngine] = {}
        further = most_engines(config.engine) - self._num_first
        self._further = FurtherEngines(cluster, further, self._add) if further > 0 else None

    def _all_serve(self, missing: Collection[int] = (), gone: Collection[int] = ()) -> Membership:
        names = [process.name for process in self._processes]
        patience = self._config.engine.patience
        return Membership(names, self._start_again, self._give_up, patience, missing, gone)

    def _add(self, slots: list[Slot], requested: RequestedEngine) -> bool:
        """Start one more engine in a thread. If the run ends or recovers from a failure, only return False.

        slots: devices of the engine.
        requested: Ray's reservation of these devices.
        """
        with self._starting:
            if self._is_closed:
                return False
            self._actors.add(by_node(slots))
            self._nodes.append(tuple(slot.node for slot in slots))
            self._reserved[len(self._nodes) - 1] = requested
            name = self._processes[-1].name
            logger.info(f"starting {name} on free devices")
            self.membership.add(name)
            return True

    @property
    def serving(self) -> Mapping[int, int]:
        """{engine index: number of starts} of the engines that get requests. A restart changes the number."""
        return self.membership.serving

    @property
    def waits_for_weights(self) -> bool:
        """True if no engine serves, but at least one has started and can serve after a weight sync."""
        return not self.serving and bool(self.membership.in_updates)

    async def next_serving(self) -> Mapping[int, int]:
        """Wait until an engine serves. Return {engine index: number of starts} of all engines that serve.

        Raises the error of the last loss if no engine has come back after rollout.engine.patience seconds, or
        if no engine is started again any more.
        """
        while not (serving := self.serving):
            self.membership.must_come_back()
            await asyncio.sleep(_PAUSE_SECONDS)
        return serving

    @property
    def members(self) -> tuple[tuple[int, int], ...]:
        """(index, number of starts) of each engine that takes part in the weight update in progress.

        If no update is in progress, the members are the engines that serve.
        """
        return tuple(self._in_update().items())

    def _in_update(self) -> Mapping[int, int]:
        return self._updating or self.membership.serving

    @property
    def processes(self) -> list[Process]:
        """Name and log of each engine that is being updated or, if no update runs, of each that serves."""
        return [self._processes[index] for index in self._in_update()]

    @property
    def nodes(self) -> tuple[str, ...]:
        """Id of each engine rank's Ray node: the ranks of the first engine in `members`, then of the next."""
        return tuple(node for index in self._in_update() for node in self._nodes[index])

    def lost(self, index: int, starts: int, error: Exception) -> None:
        """Report that an engine has died or has wrong weights, so that it is started again.

        The caller must send the engine's requests to other engines.

        index, starts: index and number of starts of the engine. A loss that was reported before is ignored.
        error: the error by which the loss was noticed.

        Raises `error` if the engines share their devices with the trainer. Raises `error` also if no other
        engine serves, and rollout.engine.patience is 0 or no engine is started again any more.
        """
        if self._shared:
            raise error
        self.membership.lose(index, starts, error)

    def _start_again(self, index: int) -> None:
        """Replace an engine's processes and wait until they are ready. Raises UserError if this fails."""
        if self._engines[index] is not None:
            self._hang_detector.outlived(self._engines[index])
        self._actors.close([index])
        if index in self._reserved and not self._reserved[index].is_whole:
            raise ProcessLost("its node has left the Ray cluster")
        addresses = self._actors.addresses([index])  # takes long if a node is gone
        with self._starting:
            if self._is_closed:
                raise ProcessLost("the engines have been stopped")
            self._actors.start([index], addresses)
        self._actors.wait_until_ready([index])

    def _give_up(self, index: int) -> None:
        """End the processes of an engine that is not started again.

        If the engine joined after the start of the run, also release its devices and request others.
        """
        if self._engines[index] is not None:
            self._hang_detector.outlived(self._engines[index])
        self._actors.close([index])
        if requested := self._reserved.pop(index, None):
            requested.release()
            self._further.replace_one()

    def recover(self, anew: bool) -> None:
        """Bring the engines into a usable state after a failure anywhere in the run.

        Engines that are dead or whose weight update was interrupted are restarted. The other engines drop
        their requests. All rounds of requests count as ended. Call `wait_until_ready` next, and then sync the
        weights. Only the engines that the run began with are waited for. Engines that joined later are
        restarted in the background.

        anew: True to restart all engines. This is necessary if they share devices with the trainer, because
            it is unknown which memory they have released.
        """
        with self._starting:
            self._is_closed = True
        self.membership.stop()
        usable = self._actors.reset(self.membership.alive)
        kept = set() if anew else usable
        lost = [index for index in range(len(self._engines)) if index not in kept]
        self._actors.close(lost)
        self.membership.join()
        first = [index for index in lost if index < self._num_first]
        self._actors.start(first, self._actors.addresses(first))
        with self._starting:
            self._is_closed = False
            gone = set(range(self._num_first, len(self._engines))) - self._reserved.keys()
            self.membership = self._all_serve(set(lost) - set(first) - gone, gone)
        self._updating, self._updated_actors, self._announced, self._released = {}, {}, {}, set()
        self.admission.restart()

    def wait_until_ready(self) -> None:
        """Wait until the engines that the run began with have started, and set `end_ids`.

        Raises UserError if an engine dies. Raises UserError also if an engine does not start within
        rollout.engine.start_timeout seconds.
        """
        self.end_ids = self._actors.wait_until_ready(range(self._num_first))

    def connections(self) -> list[EngineConnection]:
        """Return one connection per engine, by index. Each is valid until its engine is started again."""
        with self._starting:  # an engine may be joining
            return [
                EngineConnection(engine, process, self._config)
                for engine, process in zip(self._engines, self._processes, strict=True)
            ]

    def score_on_all(self, sequences: list[list[int]]) -> dict[int, list[np.ndarray]]:
        """Return {engine index: its log-probs of the sequences}, to compare them with the trainer's.

        Only engines that serve are asked. The log-probs of a sequence of n tokens are float32 [n - 1], at
        temperature 1, because the first token has none. Raises UserError if the engines take no requests,
        such as during a weight update.
        """
        self.admission.must_be_open()
        return self._on_all("score", sequences)

    def admit(self) -> None:
        """Allow the engines to answer requests with the weights that they loaded at their start (version 0).

        A weight sync admits the engines itself, so it does not need this call.
        """
        self._on_all("admit")
        self.admission.open(Closed.unsynced)

    @property
    def _keeps_cache(self) -> bool:
        return self._config.on_update == OnUpdate.keep

    def begin_update(self, again: bool = False) -> None:
        """Pause the engines and prepare them for new weights. None of them serves until `end_update`.

        Engines that are held for an evaluation are left alone. Engines that die meanwhile are passed to
        `lost`. If no engine is alive, wait until one has been started again.

        again: True to go on with the update in progress, without engines that have been lost since it began,
            and with engines that have been started again. False: begin a new update.

        Raises the error of the last loss if no engine has come back after rollout.engine.patience seconds.
        Raises UserError if the memory of the weights is released. A new update also raises UserError after
        `close`, during another update, and, if an engine serves, during a round that does not allow updates.
        """
        if MemoryPart.weights in self._released:
            raise UserError(
                "the engines have released the memory of their weights; call resume_weights first"
            )
        if not again:
            self.admission.close(Closed.updating, "begin a weight update", within_rounds=not self.serving)
        begun = self.membership.not_lost(self._updating)
        while True:
            alive = self.membership.in_updates
            new = {index: starts for index, starts in alive.items() if index not in begun}
            # From now on, calls are for these actors, and not for those that may take their place.
            self._updated_actors |= {index: self._engines[index] for index in new}
            new = self.membership.not_lost(new)
            begun = dict(sorted((begun | self._call(new, "begin_update", self._keeps_cache)).items()))
            if begun:
                self._updating = begun
                return
            self.membership.must_come_back()
            time.sleep(_PAUSE_SECONDS)

    def _call(self, engines: dict[int, int], method: str, *arguments) -> dict[int, int]:
        """Call a method of engines that take part in the update, and wait for the answers.

        Return {index: number of starts} of the engines that have answered. Dead engines are passed to `lost`.
        """
        actors = self._updated_actors
        calls = {index: getattr(actors[index], method).remote(*arguments) for index in engines}
        alive = {}
        for index, reference in calls.items():
            try:
                fetch(reference, self._processes[index], method)
                alive[index] = engines[index]
            except ProcessLost as error:
                self.lost(index, engines[index], error)
        return alive

    def receive_weights(self, command: SyncCommand) -> list[ray.ObjectRef]:
        """Make every engine of the weight update carry out a sync command. `begin_update` must come before.

        Return one Ray reference per engine in `members`, to the list of SyncReports of the engine's ranks.
        Each engine is told its position in `members`, which is its number in the reshard plan.
        """
        return [
            self._updated_actors[index].receive_weights.remote(command.to_engine(number))
            for number, index in enumerate(self._in_update())
        ]

    def end_update(self, version: int) -> None:
        """End the weight update and resume serving. Completions then report weight version `version`.

        Engines that die in this call are passed to `lost`. The callback `joined` is called with the index of
        each engine that has been started again, or has joined the run, since the last update.
        """
        # Leave out engines that were lost meanwhile: their replacements do not have the new weights.
        updated = self.membership.not_lost(self._updating)
        self._updating = self._call(updated, "end_update", version, self._keeps_cache)
        self.weight_version = version
        for index, starts in self._updating.items():
            if starts != self._announced.get(index, 0):
                self.joined(index)
                self._announced[index] = starts
        self.membership.updated(self._updating)
        self._updating, self._updated_actors = {}, {}
        self.admission.open(Closed.updating, Closed.unsynced)

    def release_memory(self) -> None:
        """Release the memory of the engines' weights and KV caches, so that the trainer can use it.

        Before the engines serve again, `resume_weights`, a weight sync and `resume_kv_cache` are necessary.
        Memory that is released already stays released. Raises UserError during a round or a weight update.
        """
        self.admission.close(Closed.asleep, "release memory")
        self._released = set(MemoryPart)
        self._on_all("release_memory")

    def resume_weights(self) -> None:
        """Allocate the memory of the engines' weights again, if it is released.

        A weight sync must then fill in the weights.
        """
        self._resume(MemoryPart.weights)

    def resume_kv_cache(self) -> None:
        """Allocate the memory of the engines' KV caches again, if it is released. They are then empty."""
        self._resume(MemoryPart.kv_cache)

    def _resume(self, part: MemoryPart) -> None:
        self.admission.must_not_be_stopped("resume memory")
        self._on_all("resume_memory", part)
        self._released.discard(part)
        if not self._released:
            self.admission.open(Closed.asleep)

    def occupied(self) -> int:
        """Return the bytes of memory in use by the engine that uses the most.

        An engine's value is the memory in use on its fullest GPU, or by its processes if it has no GPU.
        """
        return max(self._on_all("occupied").values())

    def _on_all(self, method: str, *arguments) -> dict:
        """Call a method of every engine that serves, and return {engine index: result}."""
        calls = {
            index: getattr(self._engines[index], method).remote(*arguments) for index in self._in_update()
        }
        return gather(calls, self._processes, method)

    def close(self) -> None:
        """End all engines. Rounds of requests in progress fail, and no further rounds are admitted."""
        self.admission.stop()
        self.membership.stop()
        with self._starting:
            self._is_closed = True
        if self._further:
            self._further.close()
        self._actors.close(range(len(self._engines)))
        self.membership.join()
