"""Memory of a run: the fullest GPU in each phase of a step, item by item, and the host memory of a node.

Parameters, gradients and optimizer states are counted. Activations are estimated for layers with flash
attention and a router that spreads tokens evenly. For other memory of a process, such as the CUDA context,
the constants below are assumed.
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
from grpo_megatron.planner.engines import EngineRoom, engine_room, engine_weight_bytes, fp32_head_bytes
from grpo_megatron.planner.reward_model import scorer
from grpo_megatron.planner.states import TrainingState, training_states

# Bytes of the CUDA context and of the libraries' code and workspaces; in an engine also of CUDA graphs. A
# rank with TransformerEngine had 2.7 GB on an H100. The engine's are assumed.
RANK_CONTEXT, ENGINE_CONTEXT = 3 * 10**9, 4 * 10**9
# Assumed bytes of an NCCL communicator: about two dozen channels of 4 MiB (NCCL_BUFFSIZE).
COMMUNICATOR = 10**8
# Share of a GPU's memory that is left unplanned, for fragmentation and for uses that are not known.
RESERVE = 0.05

# Largest number that num_communicators can return.
_MOST_COMMUNICATORS = 14

CONTEXT, COMMUNICATION = "context, libraries", "communication buffers"
HIDDEN = "reference's hidden states"


@dataclass(frozen=True)
class Moment:
    """Memory in use in one phase of a step, on the GPU where it is largest.

    name: name of the phase, such as `training`.
    stage: index of the pipeline stage of the trainer rank on that GPU; None: the GPU has no trainer rank, or
        a sleeping one.
    items: {item: bytes}, such as {"parameters": 8 * 10**9}.
    """

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
    """Estimated memory that a run takes on GPUs, in host memory and in files, in bytes."""

    state: TrainingState
    """Parameters, gradients and optimizer states of a rank, in the pipeline stage where they are largest."""
    moments: tuple[Moment, ...]
    """One Moment per phase: training, optimizer step, weight sync, generation, scoring by a reward model."""
    capacity: int
    """Whole memory of a GPU."""
    rank_asleep: int
    """GPU memory that a trainer rank still holds while it sleeps; 0 if ranks never sleep."""
    engine_asleep: int
    """GPU memory that an engine still holds while a trainer rank uses its GPU; 0 if they take no turns."""
    engine_weights: int
    """Weights of one engine rank."""
    room: EngineRoom
    """Numbers of tokens and requests for which one engine has room."""
    host: dict[str, int]
    """{item: bytes} in host memory, per node."""
    files: dict[str, int]
    """{item: bytes} in files in megatron.offload_folder, per node."""

    @property
    def usable(self) -> int:
        return int((1 - RESERVE) * self.capacity)

    @property
    def fullest(self) -> Moment:
        """The phase in which a GPU has the most memory in use, with that GPU's items."""
        return max(self.moments, key=lambda moment: moment.total)

    @property
    def tightest(self) -> Moment:
        """The phase, except generation, in which a GPU has the most memory in use, with that GPU's items.

        Generation is left out because the KV cache always fills the share that rollout.engine.mem_fraction
        sets.
        """
        return max(
            (moment for moment in self.moments if moment.name != "generation"),
            key=lambda moment: moment.total,
        )


def memory(config: Config, arch: Architecture) -> Memory:
    """Estimate the memory that a `train` run takes. The whole model is trained, without LoRA.

    config: must state cluster.gpu and cluster.gpus_per_node.
    arch: architecture of the model.
    """
    return _Account(config, arch).memory()


def most_engine_fraction(gpu: str) -> float:
    """Return the largest rollout.engine.mem_fraction with which an engine fits beside a sleeping rank.

    The fraction is safe for every layout of the trainer: the rest of the GPU's memory has room for the CUDA
    contexts of rank and engine, for the largest number of NCCL communicators of a rank, and for a reserve.
    The result is rounded down to a multiple of 1/20.

    gpu: name of the GPU in capabilities.GPUS.
    """
    capacity = GPUS[gpu].memory
    beside = ENGINE_CONTEXT + RANK_CONTEXT + _MOST_COMMUNICATORS * COMMUNICATOR
    return int(20 * (1 - RESERVE - beside / capacity)) / 20


def takes_turns(config: Config) -> bool:
    """Return True if trainer ranks and engines use the same GPUs in turns (colocated, with megatron.sleep).

    Each side then releases its memory while the other side computes.
    """
    return config.cluster.placement == Placement.colocated and config.megatron.sleep


class _Account:
    """Calculation of the memory that a run with one configuration takes. `memory` returns the result.

    A rank is a trainer rank. All sizes are in bytes.
    """

    def __init__(self, config: Config, arch: Architecture):
        self.config, self.arch = config, arch
        self.states = training_states(arch, config.megatron)
        self.scorer = scorer(config)
        # Parameters only, because scoring has neither gradients nor an optimizer.
        self.scorer_weights = (
            [state.parameters for state in training_states(self.scorer.arch, self.scorer.config.megatron)]
            if self.scorer
            else []
        )
        self.capacity = GPUS[config.cluster.gpu].memory
        self.hidden = reference_hidden(arch, config)
        self.weights = engine_weight_bytes(arch, config.rollout.engine)
        self.pool = int(config.rollout.engine.mem_fraction * self.capacity)
        self.room = engine_room(arch, config.rollout.engine, self.pool)
        self.residue = {CONTEXT: RANK_CONTEXT, COMMUNICATION: COMMUNICATOR * num_communicators(config)}

    def memory(self) -> Memory:
        colocated, turns = self.config.cluster.placement == Placement.colocated, takes_turns(self.config)
        context, weights = {"engine: context, graphs": ENGINE_CONTEXT}, {"engine: weights": self.weights}
        states = min(self.room.state_bytes, max(0, self.pool - self.weights))
        serving = weights | {"engine: KV cache": max(0, self.pool - self.weights - states)} | context
        if states:
            serving["engine: recurrent states"] = states
        if head := fp32_head_bytes(self.arch, self.config):
            serving["engine: output layer in float32"] = head
        # Items that are always on a rank's GPU. A colocated engine adds its context if ranks and engines take
        # turns, and else everything it holds.
        beside = self.residue | (context if turns else serving if colocated else {})
        # A weight sync has three parcels at a time: one is packed while two travel.
        parcels = {COMMUNICATION: self.residue[COMMUNICATION] + 3 * self.config.weight_sync.bucket_bytes}
        # Colocated ranks release what a step leaves behind before engines load weights (rollout.sharing).
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
            room=self.room,
            host=self._offloaded(in_files=False) | self._routing(),
            files=self._offloaded(in_files=True),
        )

    def _routing(self) -> dict[str, int]:
        """Return {item: bytes} of the buffers in host memory for the experts that engines chose, on one node.

        If training replays the routing of the engines, each engine rank has a buffer for the experts of all
        tokens in its KV cache. Otherwise the dict is empty.

        The node is one that also has trainer ranks. With separate placement, it is the trainer's last node,
        and only engine ranks on GPUs that the trainer leaves free there count.
        """
        config, moe = self.config, self.arch.moe
        if not (moe and config.moe.routing_replay == RoutingReplay.engine):
            return {}
        engine = config.rollout.engine
        tokens = self.room.tokens // engine.data_parallel_attention
        per_node, colocated = config.cluster.gpus_per_node, config.cluster.placement == Placement.colocated
        slots = per_node if colocated else -ParallelSizes.from_config(config.megatron).world_size % per_node
        ranks = min(slots, engine.num_engines * engine.tensor_parallel)
        return {"experts of cached tokens": ranks * tokens * self.arch.num_layers * moe.top_k * 4}

    def _fullest(self, name: str, items: Callable[[int], dict[str, int]], beside: dict[str, int]) -> Moment:
        """Return the memory in one phase on the fullest trainer GPU, compared over all pipeline stages.

        name: name of the phase.
        items: function that returns {item: bytes} of a rank, given the index of its pipeline stage.
        beside: {item: bytes} that is also on the GPU, whatever the stage.
        """
        moments = [Moment(name, stage, items(stage) | beside) for stage in range(len(self.states))]
        return max(moments, key=lambda moment: moment.total)

    def _resident(self, stage: int) -> dict[str, int]:
        """Return {item: bytes} of the states that stay on a rank's GPU while the rank is awake.

        These are parameters, gradients, optimizer states and the reference policy, unless they are offloaded.
        """
        state, config = self.states[stage], self.config
        found = {"parameters": state.parameters, "gradients": state.gradients, "optimizer": state.optimizer}
        if config.optimizer.offload:
            found["optimizer"] = 0
        if config.algorithm.needs_reference and not config.ref.offload:
            found["reference"] = state.parameters
        return found

    def _after_passes(self, stage: int) -> dict[str, int]:
        """Return {item: bytes} on a rank's GPU between two forward or backward passes.

        The items are parameters, gradients, optimizer states and the reference policy, unless they are
        offloaded, and buffers that a pass leaves for later passes. These buffers are released when ranks
        sleep or make room for engines.
        """
        found = self._resident(stage)
        if self.states[stage].workspaces:
            found["FP8 copies"] = self.states[stage].workspaces
        if self.hidden.on_device and self._is_last(stage):
            found[HIDDEN] = self.hidden.on_device
        return found

    def _is_last(self, stage: int) -> bool:
        return stage == len(self.states) - 1

    def _training(self, stage: int) -> dict[str, int]:
        """Return {item: bytes} on a rank's GPU during forward and backward passes."""
        config, arch = self.config, self.arch
        found = self._after_passes(stage) | {
            "activations kept": kept_activations(arch, config, stage),
            "layer being computed": working_activations(arch, config, stage),
        }
        if self._is_last(stage):
            found["output layer"] = head_bytes(arch, config)
        return found

    def _stepping(self, stage: int) -> dict[str, int]:
        """Return {item: bytes} on a rank's GPU in an optimizer step, which needs all optimizer states."""
        return self._after_passes(stage) | {"optimizer": self.states[stage].optimizer}

    def _scoring(self, stage: int) -> dict[str, int]:
        """Return {item: bytes} on a rank's GPU while the reward model scores samples.

        The reward model's weights are loaded beside the policy's, and released after the last sample.
        """
        working = working_activations(self.scorer.arch, self.scorer.config, stage, backward=False)
        gave_back = self.config.megatron.sleep or self.config.cluster.placement == Placement.colocated
        beside = self._resident(stage) if gave_back else self._after_passes(stage)
        return beside | {"reward model": self.scorer_weights[stage], "layer being computed": working}

    def _offloaded(self, in_files: bool) -> dict[str, int]:
        """Return {item: bytes} of the tensors that the ranks of one node have moved from their GPUs.

        in_files: True for the tensors in files of megatron.offload_folder, False for those in host memory.
            The reference, its hidden states, a reward model and the copy of the last synced weights are
            always in host memory.
        """
        config, sleep = self.config, self.config.megatron.sleep
        per_node, world = config.cluster.gpus_per_node, ParallelSizes.from_config(config.megatron).world_size
        parked = {"sleeping parameters": sleep, "optimizer": sleep or config.optimizer.offload}
        kept = {
            "reference": config.algorithm.needs_reference and config.ref.offload,
            HIDDEN: self.hidden.on_host > 0,
            "reward model": self.scorer is not None,
            "copy of the synced weights": config.weight_sync.delta,
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
        # A node shared with engines has fewer ranks than GPUs. Only the last stage has hidden states.
        ranks = {HIDDEN: world // len(self.states)}
        return {
            what: min(per_node, ranks.get(what, world)) * sizes.get(what, parameters)
            for what, waits in found.items()
            if waits
        }


def num_communicators(config: Config) -> int:
    """Return the number of NCCL communicators of a trainer rank, whose buffers take GPU memory.

    Each of Megatron's process groups with more than one rank has a communicator.
    """
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
    # Groups of the first and the last stage: one for the embedding, one for positions.
    groups += [sizes.pp] * 2
    groups += [sizes.dp * sizes.cp] if sizes.cp > 1 else []
    groups += [sizes.ep, sizes.etp, sizes.ep * sizes.etp, replicas] if sizes.ep * sizes.etp > 1 else []
    return sum(size > 1 for size in groups)
