"""How much memory a run takes: of the fullest GPU at each moment of a step, item by item, and of a node's host.

Parameters, gradients and optimizer states are counted. Activations are those of layers with flash attention, if the router spreads
tokens evenly. What processes take besides is assumed: the constants below.
"""

from collections.abc import Callable
from dataclasses import dataclass

from grpo_megatron.capabilities import GPUS
from grpo_megatron.config.schema import Config, Placement, RoutingReplay
from grpo_megatron.model.architecture import Architecture
from grpo_megatron.model.parallel_sizes import ParallelSizes
from grpo_megatron.planner.activations import (
    head_bytes,
    kept_activations,
    reference_hidden,
    working_activations,
)
from grpo_megatron.planner.engines import engine_weight_bytes, fp32_head_bytes, kv_tokens
from grpo_megatron.planner.reward_model import scorer
from grpo_megatron.planner.states import TrainingState, training_states

# Assumed. Of a trainer's rank: CUDA's context, code and workspaces of libraries. Of an engine's: the same with CUDA graphs.
RANK_CONTEXT, ENGINE_CONTEXT = 2 * 10**9, 4 * 10**9
# Assumed of NCCL: channels of 4 MiB (NCCL_BUFFSIZE) of one communicator, some two dozen of them.
COMMUNICATOR = 10**8
# Of a GPU's memory, not planned with: fragments, and what this arithmetic does not know.
RESERVE = 0.05

# As many as num_communicators can count.
_MOST_COMMUNICATORS = 14

CONTEXT, COMMUNICATION = "context, libraries", "communication buffers"
HIDDEN = "reference's hidden states"


@dataclass(frozen=True)
class Moment:
    """What the fullest GPU holds at a moment of a step. items: {what: bytes}. stage: whose rank it is; None: an engine's alone."""

    name: str
    stage: int | None
    items: dict[str, int]

    @property
    def total(self) -> int:
        return sum(self.items.values())

    @property
    def largest_item(self) -> str:
        return max(self.items, key=self.items.__getitem__)


@dataclass(frozen=True)
class Memory:
    """Bytes. state: of the fullest stage's rank. moments: training, optimizer step, weight sync, generation, and scoring if the
    ranks have a reward model.

    capacity: of a GPU; usable: of that, what may be planned with. rank_asleep, engine_asleep: what stays while the other has its turn.
    engine_weights: of one engine rank. kv_tokens: those that one engine's KV cache holds. host: {what: bytes of one node's memory}.
    files: {what: bytes of one node in megatron.offload_folder}.
    """

    state: TrainingState
    moments: tuple[Moment, ...]
    capacity: int
    rank_asleep: int
    engine_asleep: int
    engine_weights: int
    kv_tokens: int
    host: dict[str, int]
    files: dict[str, int]

    @property
    def usable(self) -> int:
        return int((1 - RESERVE) * self.capacity)

    @property
    def fullest(self) -> Moment:
        return max(self.moments, key=lambda moment: moment.total)

    @property
    def tightest(self) -> Moment:
        """The fullest but for generation, which is as full as rollout.engine.mem_fraction makes it."""
        return max(
            (moment for moment in self.moments if moment.name != "generation"),
            key=lambda moment: moment.total,
        )


def memory(config: Config, arch: Architecture) -> Memory:
    """Of a run of `train` that trains the whole model on the cluster that the configuration describes (cluster.gpu, gpus_per_node)."""
    return _Account(config, arch).memory()


def most_engine_fraction(gpu: str) -> float:
    """The largest rollout.engine.mem_fraction, in twentieths, that fits a GPU of GPUS beside a sleeping rank of any layout."""
    capacity = GPUS[gpu].memory
    beside = ENGINE_CONTEXT + RANK_CONTEXT + _MOST_COMMUNICATORS * COMMUNICATOR
    return int(20 * (1 - RESERVE - beside / capacity)) / 20


def takes_turns(config: Config) -> bool:
    """Whether ranks and engines give their memory to each other."""
    return config.cluster.placement == Placement.colocated and config.megatron.sleep


class _Account:
    def __init__(self, config: Config, arch: Architecture):
        self.config, self.arch = config, arch
        self.states = training_states(arch, config.megatron)
        self.scorer = scorer(config)
        # Its weights alone: there are no gradients and no optimizer.
        self.scorer_weights = (
            [state.parameters for state in training_states(self.scorer.arch, self.scorer.config.megatron)]
            if self.scorer
            else []
        )
        self.capacity = GPUS[config.cluster.gpu].memory
        self.hidden = reference_hidden(arch, config)
        self.weights = engine_weight_bytes(arch, config.rollout.engine)
        self.pool = int(config.rollout.engine.mem_fraction * self.capacity)
        self.residue = {CONTEXT: RANK_CONTEXT, COMMUNICATION: COMMUNICATOR * num_communicators(config)}

    def memory(self) -> Memory:
        colocated, turns = self.config.cluster.placement == Placement.colocated, takes_turns(self.config)
        context, weights = {"engine: context, graphs": ENGINE_CONTEXT}, {"engine: weights": self.weights}
        serving = weights | {"engine: KV cache": max(0, self.pool - self.weights)} | context
        if head := fp32_head_bytes(self.arch, self.config):
            serving["engine: output layer in float32"] = head
        # What ranks and engines on the same GPUs cannot give back: nothing without turns.
        beside = self.residue | (context if turns else serving if colocated else {})
        # Of the parcels of a sync one is packed while two travel.
        parcels = {COMMUNICATION: self.residue[COMMUNICATION] + 3 * self.config.weight_sync.bucket_bytes}
        # Before engines on the same GPUs get room for their weights, ranks give back what a step has left (run.turns).
        between = self._resident if colocated else self._after_passes
        generation = Moment("generation", None, (self.residue if turns else {}) | serving)
        if colocated and not turns:
            generation = self._fullest("generation", between, beside)
        moments = (
            self._fullest("training", self._training, beside),
            self._fullest("optimizer step", self._stepping, beside),
            self._fullest("weight sync", between, beside | parcels | (weights if turns else {})),
            generation,
            *([self._fullest("scoring", self._scoring, beside)] if self.scorer else []),
        )
        return Memory(
            state=max(self.states, key=lambda state: state.parameters + state.gradients + state.optimizer),
            moments=moments,
            capacity=self.capacity,
            rank_asleep=sum(self.residue.values()) if turns else 0,
            engine_asleep=ENGINE_CONTEXT if turns else 0,
            engine_weights=self.weights,
            kv_tokens=kv_tokens(self.arch, self.config.rollout.engine, self.pool),
            host=self._waiting(in_files=False) | self._routing(),
            files=self._waiting(in_files=True),
        )

    def _routing(self) -> dict[str, int]:
        """Count the host memory in which engines keep the experts of cached tokens, if routing is replayed.

        Each rank of an engine has such a buffer. Counted are those on a node with ranks of the trainer.
        """
        config, moe = self.config, self.arch.moe
        if not (moe and config.moe.routing_replay == RoutingReplay.engine):
            return {}
        engine = config.rollout.engine
        tokens = kv_tokens(self.arch, engine, self.pool) // engine.data_parallel_attention
        per_node, colocated = config.cluster.gpus_per_node, config.cluster.placement == Placement.colocated
        slots = per_node if colocated else -ParallelSizes.from_config(config.megatron).world_size % per_node
        ranks = min(slots, engine.num_engines * engine.tensor_parallel)
        return {"experts of cached tokens": ranks * tokens * self.arch.num_layers * moe.top_k * 4}

    def _fullest(self, name: str, items: Callable[[int], dict[str, int]], beside: dict[str, int]) -> Moment:
        """items: of a rank of a stage."""
        moments = [Moment(name, stage, items(stage) | beside) for stage in range(len(self.states))]
        return max(moments, key=lambda moment: moment.total)

    def _resident(self, stage: int) -> dict[str, int]:
        state, config = self.states[stage], self.config
        found = {"parameters": state.parameters, "gradients": state.gradients, "optimizer": state.optimizer}
        if config.optimizer.offload:
            found["optimizer"] = 0
        if config.algorithm.needs_reference and not config.ref.offload:
            found["reference"] = state.parameters
        return found

    def _after_passes(self, stage: int) -> dict[str, int]:
        """With what passes leave for the next ones, until ranks sleep or make room for engines."""
        found = self._resident(stage)
        if self.states[stage].workspaces:
            found["FP8 copies"] = self.states[stage].workspaces
        if self.hidden.on_device and self._is_last(stage):
            found[HIDDEN] = self.hidden.on_device
        return found

    def _is_last(self, stage: int) -> bool:
        return stage == len(self.states) - 1

    def _training(self, stage: int) -> dict[str, int]:
        config, arch = self.config, self.arch
        found = self._after_passes(stage) | {
            "activations kept": kept_activations(arch, config, stage),
            "layer being computed": working_activations(arch, config, stage),
        }
        if self._is_last(stage):
            found["output layer"] = head_bytes(arch, config)
        return found

    def _stepping(self, stage: int) -> dict[str, int]:
        return self._after_passes(stage) | {"optimizer": self.states[stage].optimizer}

    def _scoring(self, stage: int) -> dict[str, int]:
        """The reward model's weights come beside the policy's, and leave when all samples have their scores."""
        working = working_activations(self.scorer.arch, self.scorer.config, stage, backward=False)
        gave_back = self.config.megatron.sleep or self.config.cluster.placement == Placement.colocated
        beside = self._resident(stage) if gave_back else self._after_passes(stage)
        return beside | {"reward model": self.scorer_weights[stage], "layer being computed": working}

    def _waiting(self, in_files: bool) -> dict[str, int]:
        """What is not on the GPUs: in files, or else in the host's memory. The reference, its hidden states, a reward model and what was
        synced last are never in files."""
        config, sleep = self.config, self.config.megatron.sleep
        per_node, world = config.cluster.gpus_per_node, ParallelSizes.from_config(config.megatron).world_size
        parked = {"sleeping parameters": sleep, "optimizer": sleep or config.optimizer.offload}
        kept = {
            "reference": config.algorithm.needs_reference and config.ref.offload,
            HIDDEN: self.hidden.on_host > 0,
            "reward model": self.scorer is not None,
            "what was synced last": config.weight_sync.delta,
        }
        if config.megatron.offload_folder is None:
            parked, kept = {}, parked | kept
        found = parked if in_files else kept
        sizes = {
            "optimizer": max(state.optimizer for state in self.states),
            "reward model": max(self.scorer_weights, default=0),
            HIDDEN: self.hidden.on_host,
        }
        parameters = max(state.parameters for state in self.states)
        # On a node that ranks share with engines there are fewer ranks than GPUs, and those of the last stage alone have hidden states.
        ranks = {HIDDEN: world // len(self.states)}
        return {
            what: min(per_node, ranks.get(what, world)) * sizes.get(what, parameters)
            for what, waits in found.items()
            if waits
        }


def num_communicators(config: Config) -> int:
    """Process groups of several ranks that a rank of the trainer is in, as Megatron makes them."""
    sizes = ParallelSizes.from_config(config.megatron)
    replicas = sizes.tp * sizes.cp * sizes.dp // (sizes.ep * sizes.etp)
    groups = [
        sizes.world_size,
        sizes.tp,
        sizes.pp,
        sizes.dp,
        sizes.cp,
        sizes.tp * sizes.pp,
        sizes.tp * sizes.cp,
    ]
    groups += [sizes.pp] * 2  # the first stage with the last, for the embedding and for positions
    groups += [sizes.dp * sizes.cp] if sizes.cp > 1 else []
    groups += [sizes.ep, sizes.etp, sizes.ep * sizes.etp, replicas] if sizes.ep * sizes.etp > 1 else []
    return sum(size > 1 for size in groups)
