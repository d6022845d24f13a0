"""The Ray actors of engines: one for each node of each engine."""

import contextlib
from collections.abc import Iterable, Mapping, Sequence

import ray

from grpo_megatron.cluster.hang_detector import HangDetector
from grpo_megatron.cluster.placement import Cluster, Slot
from grpo_megatron.cluster.ports import free_address
from grpo_megatron.cluster.processes import Process, gather, process_error
from grpo_megatron.config.derived import most_engines
from grpo_megatron.config.lora import LoraConfig
from grpo_megatron.config.rollout import RolloutConfig
from grpo_megatron.config.schema import ModelConfig
from grpo_megatron.errors import ProcessLost
from grpo_megatron.model.families import read_architecture
from grpo_megatron.sglang.arguments import engine_arguments, engine_environment, node_arguments
from grpo_megatron.sglang.engine import SGLangEngine
from grpo_megatron.sglang.node import EngineNode

_SHUTDOWN_SECONDS = 20.0
# Maximum seconds in which a healthy engine drops its requests.
_RESET_SECONDS = 20.0
# Difference between the random seeds of an engine and of its replacement. It is larger than the number of
# engines.
_NEXT_SEED = 1_000_003
# With data-parallel attention, SGLang also uses the seven ports after the one in its address.
_PORTS = 8


@ray.remote
def _free_address() -> str:
    return free_address(_PORTS)


class EngineActors:
    """Starts and ends the processes of a run's engines.

    engines: the actor of each engine, by index; None before its first start
    processes: name and log of each engine, by index
    """

    def __init__(
        self,
        cluster: Cluster,
        config: RolloutConfig,
        model: ModelConfig,
        seed: int,
        log_dir: str,
        hang_detector: HangDetector,
        routing: bool,
        shared: bool,
        stops: bool,
        lora: LoraConfig | None,
    ):
        """Prepare the settings of the run's first engines, without starting them.

        seed: random seed of engine 0; engine i gets seed + i.
        log_dir: folder of the engines' log files.
        hang_detector: monitors the heartbeats of all engines.
        routing: True to report, in completions, the experts (MoE) that each token was routed to.
        shared: True if the engines share their devices with the trainer, and must be able to release their
            memory.
        stops: True if requests may have stop strings, even if rollout.stop is empty.
        lora: settings of the adapter that the engines serve. None: they serve merged weights.
        """
        self._cluster, self._config, self._model, self._seed = cluster, config, model, seed
        self._shared, self._has_text, self._lora = shared, stops or bool(config.stop), lora
        self._log_dir, self._hang_detector = log_dir, hang_detector
        self.processes: list[Process] = []
        self.engines: list = []
        # For each engine, the processes on its further nodes.
        self._others: list[dict[Process, ray.actor.ActorHandle]] = []
        # For each engine, its SGLang arguments, and the Ray options of the actor on each of its nodes.
        self._settings: list[tuple[dict, list[dict]]] = []
        moe = read_architecture(model.path).moe
        self._experts = moe if routing else None
        # Reports of new tokens let another engine continue a response. They cost time, so a run with only one
        # engine has none.
        goes_on = max(len(cluster.engine_nodes), most_engines(config.engine)) > 1 and not shared
        self._log_every = config.engine.log_every if goes_on else 0
        for nodes in cluster.engine_nodes:
            self.add(nodes)

    def add(self, nodes: Sequence[Sequence[Slot]]) -> None:
        """Prepare the settings of one more engine, which gets the next index.

        nodes: the engine's slots on each of its nodes.
        """
        index, config, threads = len(self.engines), self._config, self._cluster.engine_threads
        gpu = nodes[0][0].device is not None
        arguments = engine_arguments(
            config.engine,
            self._model,
            self._seed + index,
            self._has_text,
            gpu,
            bool(self._experts),
            self._lora,
        )
        arguments["enable_memory_saver"] = self._shared
        # A node that has joined the cluster since the start has no number of threads of its own.
        usual = min(threads.values(), default=1)
        options = [
            self._cluster.options(
                slots[0],
                engine_environment(config.engine, gpu, threads.get(slots[0].node, usual), self._model.path),
                [slot.device for slot in slots],
            )
            for slots in nodes
        ]
        self.processes.append(Process(f"engine {index}", f"{self._log_dir}/engine{index}.log"))
        self._settings.append((arguments, options))
        self.engines.append(None)
        self._others.append({})

    def start(self, indices: Iterable[int], addresses: Mapping[int, str]) -> None:
        """Start the engines with these indices, with one Ray actor on each node of each engine.

        addresses: {engine index: host:port for the rendezvous}, as returned by the method `addresses` for
            these engines.
        """
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
            self.engines[index] = start(
                self.processes[index], arguments, self._experts, others, self._log_every, self._lora
            )
            self._others[index] = others
            # With the same seed, a replacement would repeat the random numbers of the engine's first steps.
            self._settings[index][0]["random_seed"] += _NEXT_SEED
            self._hang_detector.add(self.processes[index], self.engines[index])

    def addresses(self, indices: Iterable[int]) -> dict[int, str]:
        """Return {engine index: host:port at which the engine's processes find each other (rendezvous)}.

        Only engines on several nodes, or with data-parallel attention, need an address. Other engines are
        left out. The first nodes of the engines are asked for a free port, all at the same time.

        Raises ProcessLost if a node does not report a free port.
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

    def wait_until_ready(self, indices: Sequence[int]) -> frozenset[int]:
        """Wait until all processes of these engines run. Return the ids of the tokens that end a response.

        Raises UserError if an engine dies. Raises UserError also if an engine does not start within
        rollout.engine.start_timeout seconds.
        """
        nodes = [pair for index in indices for pair in self._others[index].items()]
        nodes += [(self.processes[index], self.engines[index]) for index in indices]
        calls = {index: node.ready.remote() for index, (_, node) in enumerate(nodes)}
        processes = [process for process, _ in nodes]
        started = gather(calls, processes, "ready", self._config.engine.start_timeout)
        return started[len(nodes) - 1].end_ids  # all engines, which come last, have the same model

    def reset(self, indices: Iterable[int]) -> set[int]:
        """Make engines drop their requests. Return the indices of those that can be used further."""
        resets = {index: self.engines[index].reset.remote() for index in indices}
        ray.wait(list(resets.values()), num_returns=len(resets), timeout=_RESET_SECONDS)
        return {index for index, reset in resets.items() if _answered_yes(reset)}

    def close(self, indices: Iterable[int]) -> None:
        actors = [
            actor
            for index in indices
            for actor in (self.engines[index], *self._others[index].values())
            if actor is not None
        ]
        for index in indices:
            if self.engines[index] is not None:
                self._hang_detector.remove(self.engines[index])
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
