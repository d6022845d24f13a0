"""All engines of a run behind one object: started, waited for, asked, given weights, closed."""

import contextlib
from collections.abc import Iterable

import numpy as np
import ray

from grpo_megatron.cluster.placement import Cluster
from grpo_megatron.cluster.ports import free_address
from grpo_megatron.cluster.processes import Process, fetch, gather, process_error
from grpo_megatron.cluster.watch import Watch
from grpo_megatron.config.rollout import RolloutConfig
from grpo_megatron.config.schema import ModelConfig
from grpo_megatron.config.weight_sync import PauseMode
from grpo_megatron.errors import ProcessLost
from grpo_megatron.model.families import read_architecture
from grpo_megatron.sglang.arguments import engine_arguments, engine_environment, node_arguments
from grpo_megatron.sglang.client import EngineClient
from grpo_megatron.sglang.engine import SGLangEngine
from grpo_megatron.sglang.memory import Part
from grpo_megatron.sglang.node import EngineNode
from grpo_megatron.weights.sync.order import Order

_SHUTDOWN_SECONDS = 20.0
# Between the seeds of an engine and of the one in its place; more than there are engines.
_NEXT_SEED = 1_000_003
# What an engine that can go on may take to drop its requests.
_RESET_SECONDS = 20.0
# With data-parallel attention, SGLang takes the seven ports behind that of its address.
_PORTS = 8


@ray.remote
def _free_address() -> str:
    return free_address(_PORTS)


class EnginePool:
    """Engines that serve the same weights. weight_version: of the weights they were given last, 0 before that."""

    def __init__(
        self,
        cluster: Cluster,
        config: RolloutConfig,
        model: ModelConfig,
        seed: int,
        log_dir: str,
        watch: Watch,
        routing: bool = False,
        pause: PauseMode = PauseMode.retract,
        shared: bool = False,
    ):
        """Start all engines and return at once; `wait_until_ready` waits for them. watch: is told of all engines.

        routing: completions carry the experts that their tokens went to. pause: what an update does to running requests.
        shared: others will have the engines' memory in turns, see run.turns.
        """
        self._config, self._pause = config, pause
        self.weight_version = 0
        self._batch = 0
        self._log_dir, self._watch = log_dir, watch
        self.nodes = tuple(slot.node for slots in cluster.engine_slots for slot in slots)
        self.processes = [
            Process(f"engine {number}", f"{log_dir}/engine{number}.log")
            for number in range(len(cluster.engine_nodes))
        ]
        self._engines: list = []
        # Of each engine, its nodes but the first.
        self._others: list[dict[Process, ray.actor.ActorHandle]] = []
        # Of each engine, its arguments and Ray's options on each of its nodes.
        self._settings: list[tuple[dict, list[dict]]] = []
        moe = read_architecture(model.path).moe
        self._routed_layers = moe.layers if routing and moe else None
        for number, nodes in enumerate(cluster.engine_nodes):
            gpu = nodes[0][0].device is not None
            arguments = engine_arguments(
                config.engine, model, seed + number, bool(config.stop), gpu, bool(self._routed_layers)
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

    def _start(self, numbers: Iterable[int]) -> None:
        """Engines: of each, the process on its first node, and those on the others. Raises ProcessLost if a node does not answer."""
        addresses = self._addresses(numbers)
        for number in numbers:
            arguments, options = self._settings[number]
            if number in addresses:
                arguments = arguments | node_arguments(0, len(options), addresses[number])
            others = {}
            for node, of_node in enumerate(options[1:], 1):
                process = Process(
                    f"node {node} of engine {number}", f"{self._log_dir}/engine{number}-node{node}.log"
                )
                others[process] = EngineNode.options(**of_node).remote(
                    process, arguments | {"node_rank": node}
                )
            # Many calls at a time: `poll` waits in the engine while requests and updates arrive.
            start = SGLangEngine.options(**options[0], max_concurrency=1000).remote
            self._engines[number] = start(self.processes[number], arguments, self._routed_layers, others)
            self._others[number] = others
            self._watch.add(self.processes[number], self._engines[number])

    def _addresses(self, numbers: Iterable[int]) -> dict[int, str]:
        """Where the processes of those engines meet that need a port; asked on their first nodes, all at once."""
        asked = {}
        for number in numbers:
            arguments, options = self._settings[number]
            if len(options) > 1 or arguments["enable_dp_attention"]:
                asked[number] = _free_address.options(**options[0] | {"num_gpus": 0}).remote()
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
                f"the first nodes of the engines {sorted(asked)} did not name a free port within {limit}"
            ) from error
        except ray.exceptions.RayError as error:
            raise process_error(error, self.processes[min(asked)], "free_address") from error

    def recover(self, anew: bool) -> None:
        """After a failure anywhere: engines that cannot go on start anew, the others drop their requests; see `wait_until_ready`.

        anew: all of them, because nobody knows what they have given back to those who share their devices.
        """
        resets = [engine.reset.remote(self._batch) for engine in self._engines]
        ray.wait(resets, num_returns=len(resets), timeout=_RESET_SECONDS)
        lost = [number for number, reset in enumerate(resets) if anew or not _answered_yes(reset)]
        self._close(lost)
        for number in lost:
            # Else it would draw the random numbers of its first steps again.
            self._settings[number][0]["random_seed"] += _NEXT_SEED
        self._start(lost)

    def wait_until_ready(self) -> None:
        """Raises UserError for an engine that died, or did not start within rollout.engine.start_timeout seconds."""
        nodes = [pair for others in self._others for pair in others.items()]
        nodes += zip(self.processes, self._engines, strict=True)
        calls = {number: node.ready.remote() for number, (_, node) in enumerate(nodes)}
        gather(calls, [process for process, _ in nodes], "ready", self._config.engine.start_timeout)

    def clients(self) -> list[EngineClient]:
        """One client for each engine, to be used within one event loop; what those before have asked for is done, or aborted."""
        self._batch += 1
        pairs = zip(self._engines, self.processes, strict=True)
        return [EngineClient(engine, process, self._config, self._batch) for engine, process in pairs]

    def score(self, sequences: list[list[int]]) -> list[np.ndarray]:
        """See SGLangEngine.score; by the first engine."""
        return fetch(self._engines[0].score.remote(sequences), self.processes[0], "score")

    def score_on_all(self, sequences: list[list[int]]) -> list[list[np.ndarray]]:
        """See SGLangEngine.score; by each engine."""
        return list(self._on_all("score", sequences).values())

    def admit(self) -> None:
        """Let the engines serve the weights that they loaded when they started, as version 0; a weight sync does without."""
        self._on_all("admit")

    def begin_update(self) -> None:
        """Pause every engine, and open an update session on it; none serves until `end_update`."""
        self._on_all("begin_update", self._pause)

    def load_bucket(self, bucket: ray.ObjectRef) -> list[str]:
        """Load a part of the new weights into every engine; the HF names of its tensors.

        bucket: reference to a weights.buckets.Bucket.
        """
        return self._on_all("load_bucket", bucket)[0]

    def sync_order(self, order: Order) -> list[ray.ObjectRef]:
        """Have every engine carry out an order within the session; one reference each, to the answers of its ranks."""
        return [
            engine.sync_order.remote(order.to_engine(number)) for number, engine in enumerate(self._engines)
        ]

    def end_update(self, version: int) -> None:
        """Close the session; what is sampled from now on carries `version`."""
        self._on_all("end_update", version, self._pause == PauseMode.in_place)
        self.weight_version = version

    def release_memory(self) -> None:
        """Give back the memory of weights and KV caches. Nothing may be running; what they serve next, is synced first."""
        self._on_all("release_memory")

    def resume_weights(self) -> None:
        """Have memory for weights again, which a sync must fill."""
        self._on_all("resume_memory", Part.weights)

    def resume_kv_cache(self) -> None:
        """Have the empty KV caches again."""
        self._on_all("resume_memory", Part.kv_cache)

    def occupied(self) -> int:
        """Bytes of the fullest engine, see memory.engine_bytes."""
        return max(self._on_all("occupied").values())

    def _on_all(self, method: str, *arguments) -> dict:
        calls = {
            number: getattr(engine, method).remote(*arguments) for number, engine in enumerate(self._engines)
        }
        return gather(calls, self.processes, method)

    def close(self) -> None:
        self._close(range(len(self._engines)))

    def _close(self, numbers: Iterable[int]) -> None:
        actors = [
            actor for number in numbers for actor in (self._engines[number], *self._others[number].values())
        ]
        for number in numbers:
            self._watch.remove(self._engines[number])
        if not actors:
            return
        # Asked first, so that SGLang ends its children; one that is dead already ended them.
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
