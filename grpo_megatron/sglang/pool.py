"""EnginePool starts, queries, updates and closes all SGLang engines of a run."""

import contextlib
from collections.abc import Iterable

import numpy as np
import ray

from grpo_megatron.cluster.hang_detector import HangDetector
from grpo_megatron.cluster.placement import Cluster
from grpo_megatron.cluster.ports import free_address
from grpo_megatron.cluster.processes import Process, fetch, gather, process_error
from grpo_megatron.config.rollout import OnUpdate, RolloutConfig
from grpo_megatron.config.schema import ModelConfig
from grpo_megatron.errors import ProcessLost, UserError
from grpo_megatron.model.families import read_architecture
from grpo_megatron.sglang.admission import Admission, Closed
from grpo_megatron.sglang.arguments import engine_arguments, engine_environment, node_arguments
from grpo_megatron.sglang.client import EngineConnection
from grpo_megatron.sglang.engine import SGLangEngine
from grpo_megatron.sglang.memory import MemoryPart
from grpo_megatron.sglang.node import EngineNode
from grpo_megatron.weights.sync.messages import SyncCommand

_SHUTDOWN_SECONDS = 20.0
# Difference between the random seeds of an engine and of its replacement. It is larger than the number of
# engines.
_NEXT_SEED = 1_000_003
# Maximum seconds in which a healthy engine drops its requests.
_RESET_SECONDS = 20.0
# With data-parallel attention, SGLang also uses the seven ports after the one in its address.
_PORTS = 8


@ray.remote
def _free_address() -> str:
    return free_address(_PORTS)


class EnginePool:
    """The engines of a run, which all serve the same weights.

    admission: admits rounds of requests, unless weights are updated or memory is released.
    weight_version: version of the weights that the last sync sent; 0 before the first sync.
    end_ids: ids of the tokens that end a response. Empty before `wait_until_ready`.
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
    ):
        """Start all engines and return immediately. `wait_until_ready` waits for them.

        seed: random seed of engine 0; engine i gets seed + i.
        log_dir: folder of the engines' log files.
        hang_detector: monitors the heartbeats of all engines.
        routing: True to report, in completions, the experts (MoE) that each token was routed to.
        shared: True if the engines share their devices with the trainer, so that they must be able to release
            their memory while the trainer computes (rollout.sharing).
        """
        self._config = config
        self.admission, self.weight_version = Admission(), 0
        self._released: set[MemoryPart] = set()
        self.end_ids: frozenset[int] = frozenset()
        self._log_dir, self._hang_detector = log_dir, hang_detector
        self.nodes = tuple(slot.node for slots in cluster.engine_slots for slot in slots)
        self.processes = [
            Process(f"engine {index}", f"{log_dir}/engine{index}.log")
            for index in range(len(cluster.engine_nodes))
        ]
        self._engines: list = []
        # For each engine, the processes on its further nodes.
        self._others: list[dict[Process, ray.actor.ActorHandle]] = []
        # For each engine, its SGLang arguments, and the Ray options of the actor on each of its nodes.
        self._settings: list[tuple[dict, list[dict]]] = []
        moe = read_architecture(model.path).moe
        self._experts = moe if routing else None
        for index, nodes in enumerate(cluster.engine_nodes):
            gpu = nodes[0][0].device is not None
            arguments = engine_arguments(
                config.engine, model, seed + index, bool(config.stop), gpu, bool(self._experts)
            )
            arguments["enable_memory_saver"] = shared
            options = [
                cluster.options(
                    slots[0],
                    engine_environment(config.engine, gpu, cluster.engine_threads.get(slots[0].node, 1)),
                    [slot.device for slot in slots],
                )
                for slots in nodes
            ]
            self._settings.append((arguments, options))
            self._engines.append(None)
            self._others.append({})
        self._start(range(len(self._settings)))

    def _start(self, indices: Iterable[int]) -> None:
        """Start the engines with these indices, with one Ray actor on each node of each engine.

        Raises ProcessLost if a node does not report a free port for an engine's rendezvous.
        """
        addresses = self._addresses(indices)
        for index in indices:
            arguments, options = self._settings[index]
            if index in addresses:
                arguments = arguments | node_arguments(0, len(options), addresses[index])
            others = {}
            for node, of_node in enumerate(options[1:], 1):
                process = Process(
                    f"node {node} of engine {index}", f"{self._log_dir}/engine{index}-node{node}.log"
                )
                others[process] = EngineNode.options(**of_node).remote(
                    process, arguments | {"node_rank": node}
                )
            # The actor runs many calls at a time: `poll` waits in the engine while requests and updates
            # arrive.
            start = SGLangEngine.options(**options[0], max_concurrency=1000).remote
            self._engines[index] = start(self.processes[index], arguments, self._experts, others)
            self._others[index] = others
            self._hang_detector.add(self.processes[index], self._engines[index])

    def _addresses(self, indices: Iterable[int]) -> dict[int, str]:
        """Return {engine index: host:port at which the engine's processes find each other (rendezvous)}.

        Only engines on several nodes, or with data-parallel attention, need an address. The first node of
        each such engine is asked for a free port, all nodes at the same time.

        indices: indices of the engines.
        """
        asked = {}
        for index in indices:
            arguments, options = self._settings[index]
            if len(options) > 1 or arguments["enable_dp_attention"]:
                asked[index] = _free_address.options(**options[0] | {"num_gpus": 0}).remote()
        try:
            return dict(
                zip(
                    asked,
                    ray.get(list(asked.values()), timeout=self._config.engine.start_timeout),
                    strict=True,
                )
            )
        except ray.exceptions.GetTimeoutError as error:
            limit = f"rollout.engine.start_timeout={self._config.engine.start_timeout:.0f} s"
            raise ProcessLost(
                f"the first nodes of the engines {sorted(asked)} did not report a free port within {limit}; "
                "raise this limit if the nodes start slowly"
            ) from error
        except ray.exceptions.RayError as error:
            raise process_error(error, self.processes[min(asked)], "free_address") from error

    def recover(self, anew: bool) -> None:
        """Bring the engines into a usable state after a failure anywhere in the run.

        Engines that are dead or whose weight update was interrupted are restarted. The other engines drop
        their requests. The caller must call `wait_until_ready` next, and then sync the weights.

        anew: True to restart all engines. This is necessary if they share devices with the trainer, because
            it is unknown which memory they have released.
        """
        resets = [engine.reset.remote() for engine in self._engines]
        ray.wait(resets, num_returns=len(resets), timeout=_RESET_SECONDS)
        lost = [index for index, reset in enumerate(resets) if anew or not _answered_yes(reset)]
        self._close(lost)
        for index in lost:
            # With the old seed, a restarted engine would repeat the random numbers of its first steps.
            self._settings[index][0]["random_seed"] += _NEXT_SEED
        self._start(lost)
        self._released = set()
        self.admission.restart()

    def wait_until_ready(self) -> None:
        """Wait until all processes of all engines have started.

        Raises UserError if an engine dies. Raises UserError also if an engine does not start within
        rollout.engine.start_timeout seconds.
        """
        nodes = [pair for others in self._others for pair in others.items()]
        nodes += zip(self.processes, self._engines, strict=True)
        calls = {index: node.ready.remote() for index, (_, node) in enumerate(nodes)}
        processes = [process for process, _ in nodes]
        started = gather(calls, processes, "ready", self._config.engine.start_timeout)
        self.end_ids = started[len(nodes) - 1].end_ids  # all engines, which come last, have the same model

    def connections(self) -> list[EngineConnection]:
        """Return what another process needs to send requests to each engine, until the next `recover`."""
        return [
            EngineConnection(engine, process, self._config)
            for engine, process in zip(self._engines, self.processes, strict=True)
        ]

    def score(self, sequences: list[list[int]]) -> list[np.ndarray]:
        """Return the first engine's log-probs of given token sequences at temperature 1.

        The result for a sequence of n tokens is float32 [n - 1], because its first token has no log-prob.
        """
        self.admission.must_be_open()
        return fetch(self._engines[0].score.remote(sequences), self.processes[0], "score")

    def score_on_all(self, sequences: list[list[int]]) -> list[list[np.ndarray]]:
        """Return every engine's log-probs of the same token sequences, to compare them with the trainer's.

        result[i][j] belongs to engine i and sequence j. It is float32 [n - 1] for n tokens, at temperature 1,
        because the first token has no log-prob.
        """
        self.admission.must_be_open()
        return list(self._on_all("score", sequences).values())

    def admit(self) -> None:
        """Allow the engines to answer requests with the weights that they loaded at their start (version 0).

        A weight sync admits the engines itself, so it does not need this call.
        """
        self._on_all("admit")
        self.admission.open(Closed.unsynced)

    @property
    def _keeps_cache(self) -> bool:
        return self._config.on_update == OnUpdate.keep

    def begin_update(self) -> None:
        """Pause every engine and prepare it for new weights. No engine serves requests until `end_update`.

        Raises UserError during another update, during a round that does not allow updates, and while the
        memory of weights is released.
        """
        if MemoryPart.weights in self._released:
            raise UserError(
                "the engines have released the memory of their weights; call resume_weights first"
            )
        self.admission.close(Closed.updating, "begin a weight update")
        self._on_all("begin_update", self._keeps_cache)

    def receive_weights(self, command: SyncCommand) -> list[ray.ObjectRef]:
        """Make every engine carry out a weight-sync command, between `begin_update` and `end_update`.

        Return one Ray reference per engine, to the list of SyncReports of the engine's ranks.
        """
        return [
            engine.receive_weights.remote(command.to_engine(index))
            for index, engine in enumerate(self._engines)
        ]

    def end_update(self, version: int) -> None:
        """End the weight update and resume serving. Completions then report weight version `version`."""
        self._on_all("end_update", version, self._keeps_cache)
        self.weight_version = version
        self.admission.open(Closed.updating, Closed.unsynced)

    def release_memory(self) -> None:
        """Release the memory of the engines' weights and KV caches, so that the trainer can use it.

        Before the engines serve again, `resume_weights`, a weight sync and `resume_kv_cache` are necessary.
        Memory that is released already stays so. Raises UserError during a round or a weight update.
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
        calls = {
            index: getattr(engine, method).remote(*arguments) for index, engine in enumerate(self._engines)
        }
        return gather(calls, self.processes, method)

    def close(self) -> None:
        """End all engines. Rounds that are in progress fail, and no further ones are admitted."""
        self.admission.stop()
        self._close(range(len(self._engines)))

    def _close(self, indices: Iterable[int]) -> None:
        actors = [
            actor for index in indices for actor in (self._engines[index], *self._others[index].values())
        ]
        for index in indices:
            self._hang_detector.remove(self._engines[index])
        if not actors:
            return
        # Ask first, so that SGLang ends its child processes. A dead actor has no children left.
        with contextlib.suppress(ray.exceptions.RayError):
            ray.wait(
                [actor.shutdown.remote() for actor in actors],
                num_returns=len(actors),
                timeout=_SHUTDOWN_SECONDS,
            )
        for actor in actors:
            ray.kill(actor)


def _answered_yes(reference: ray.ObjectRef) -> bool:
    try:
        return ray.get(reference, timeout=0)
    except (ray.exceptions.RayError, TimeoutError):
        return False
