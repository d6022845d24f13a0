"""How much memory a run takes, by arithmetic: of the fullest device at each moment of a step, and of a node's host.

Parameters, gradients and optimizer states follow from the weight map and the layout, exactly but for paddings. Activations are those that
layers with flash attention keep for the backward pass, if the router spreads tokens evenly. What processes take besides is assumed.
"""

from dataclasses import dataclass
from math import prod

from grpo_megatron.capabilities import GPUS
from grpo_megatron.config.schema import Config, MegatronConfig, Placement, Precision, Recompute
from grpo_megatron.model.architecture import Architecture
from grpo_megatron.model.entries import EngineLayout, engine_shapes
from grpo_megatron.model.families import weight_map
from grpo_megatron.model.parallel_sizes import ParallelSizes
from grpo_megatron.weights.sync.ranks import TrainerRanks

# Assumed, of a trainer's rank and of an engine's: CUDA's context, NCCL's buffers, workspaces of libraries; an engine has CUDA graphs.
RANK_OVERHEAD, ENGINE_OVERHEAD = 3 * 10**9, 4 * 10**9


@dataclass(frozen=True)
class TrainingState:
    """Bytes of one rank that last from step to step. workspaces: FP8 copies of the weights, as they are and transposed."""

    parameters: int
    gradients: int
    optimizer: int
    workspaces: int = 0


@dataclass(frozen=True)
class Estimate:
    """Bytes; of devices, those of the fullest rank.

    training: in the forward and backward passes. stepping: in the optimizer step. syncing: while weights go to the engines. serving:
    while engines generate. engine_weights: of one engine rank; kv_tokens: those that one engine's KV cache holds. host: of one
    node, for what sleeps, is offloaded, or waits as the reference.
    """

    state: TrainingState
    activations: int
    training: int
    stepping: int
    syncing: int
    serving: int
    engine_weights: int
    kv_tokens: int
    host: int

    @property
    def peak(self) -> int:
        return max(self.training, self.stepping, self.syncing, self.serving)


def training_states(arch: Architecture, megatron: MegatronConfig) -> list[TrainingState]:
    """Of a rank of each pipeline stage, all of whose ranks are alike; the whole model is trained."""
    sizes = ParallelSizes.from_config(megatron)
    ranks = TrainerRanks(sizes, arch.num_layers)
    dense, experts = [0] * sizes.pp, [0] * sizes.pp
    for entry in weight_map(arch).values():
        if not entry.exported and sizes.pp == 1:
            continue  # the tied output layer is the embedding itself
        elements = prod(entry.megatron_shape(ranks.shards(entry)))
        of = experts if entry.expert else dense
        of[ranks.stage(entry)] += elements
    low = megatron.precision != Precision.fp32
    # Two moments in float32, and where the parameters are not in float32 a master copy of them.
    per_element = 12 if low else 8
    replicas, expert_replicas = sizes.dp * sizes.cp, sizes.tp * sizes.cp * sizes.dp // (sizes.ep * sizes.etp)
    if not megatron.distributed_optimizer:
        replicas = expert_replicas = 1
    found = []
    for plain, expert in zip(dense, (count // sizes.ep for count in experts), strict=True):
        optimizer = per_element * (plain // replicas + expert // expert_replicas)
        fp8 = 2 * (plain + expert) if megatron.precision == Precision.fp8 else 0
        found.append(TrainingState(_itemsize(megatron) * (plain + expert), 4 * (plain + expert), optimizer, fp8))
    return found


def layer_activations(arch: Architecture, megatron: MegatronConfig, has_experts: bool, recomputed: frozenset[str]) -> float:
    """Bytes for each token of a rank's micro-batch that one layer keeps for its backward pass.

    recomputed: the parts whose inputs alone are kept, of mlp, moe and layernorm; core_attn keeps nothing in any case. Of a token each
    tensor-parallel rank has its part of every projection, and with sequence parallelism of what norms and router take and give.
    """
    sizes = ParallelSizes.from_config(megatron)
    share = 1 / sizes.tp if sizes.sequence_parallel else 1
    # What the two norms take, and what they give.
    elements = (2 if "layernorm" in recomputed else 4) * arch.hidden_size * share + _attention_elements(arch, sizes)
    if not has_experts:
        elements += 0 if "mlp" in recomputed else 3 * arch.ffn_hidden_size / sizes.tp
    elif "moe" not in recomputed:
        moe = arch.moe
        # A token's copy for each of its experts: in, gate and up, activated, out. The router is in float32.
        copy = 2 * arch.hidden_size + 3 * moe.ffn_hidden_size / sizes.etp
        elements += share * (moe.top_k * sizes.etp * copy + 2 * moe.num_experts) + 3 * moe.shared_ffn_hidden_size / sizes.tp
    return elements * _itemsize(megatron)


def _itemsize(megatron: MegatronConfig) -> int:
    return 4 if megatron.precision == Precision.fp32 else 2


def _attention_elements(arch: Architecture, sizes: ParallelSizes) -> float:
    """Queries, keys and values, once more before their norms, and what attention gives."""
    if arch.latent is None:
        queries, keys = arch.num_heads * arch.head_dim / sizes.tp, max(1, arch.num_kv_heads / sizes.tp) * arch.head_dim
        return 2 * queries + 2 * keys + (queries + keys if arch.qk_norm else 0)
    latent = arch.latent
    # Every rank has all of the latents, before and after their norms.
    latents = 2 * (latent.kv_rank + (latent.query_rank or 0)) + latent.rotated_dim
    return latents + arch.num_heads / sizes.tp * (2 * (latent.plain_dim + latent.rotated_dim) + 2 * latent.value_dim)


def kept_of_layers(arch: Architecture, megatron: MegatronConfig, stage: int) -> list[float]:
    """As `layer_activations`, of each layer of a pipeline stage, with what megatron.recompute leaves of them."""
    sizes = ParallelSizes.from_config(megatron)
    layers = _layers_of(arch, sizes, stage)
    if megatron.recompute == Recompute.full:
        return [_itemsize(megatron) * arch.hidden_size / (sizes.tp if sizes.sequence_parallel else 1)] * len(layers)
    selective = megatron.recompute == Recompute.selective
    recomputed = frozenset(megatron.recompute_modules if selective else ())
    return [layer_activations(arch, megatron, has_experts, recomputed) for has_experts in layers]


def activations(arch: Architecture, config: Config, stage: int) -> int:
    """Bytes of a rank of a pipeline stage when it holds most: those of all micro-batches under way, and of the layer being computed."""
    megatron, sizes = config.megatron, ParallelSizes.from_config(config.megatron)
    # 1F1B: the first stage has begun as many micro-batches as there are stages, before it ends one.
    micro_batches = float(sizes.pp - stage)
    if sizes.vpp > 1:
        micro_batches = (2 * (sizes.pp - stage - 1) + (sizes.vpp - 1) * sizes.pp + 1) / sizes.vpp
    whole = max(layer_activations(arch, megatron, has_experts, frozenset()) for has_experts in _layers_of(arch, sizes, stage))
    # Gradients of one layer are about as large as what it keeps; its inputs are gathered over the tensor-parallel ranks.
    working = 2 * whole + 4 * _itemsize(megatron) * arch.hidden_size
    per_token = micro_batches * sum(kept_of_layers(arch, megatron, stage)) + working
    return int(config.train.max_tokens_per_micro_batch * per_token)


def _layers_of(arch: Architecture, sizes: ParallelSizes, stage: int) -> list[bool]:
    """Whether each layer of a pipeline stage has experts."""
    experts = arch.moe.layers if arch.moe else (False,) * arch.num_layers
    found, first = [], 0
    for chunk, layers in enumerate(sizes.chunk_layers(arch.num_layers)):
        if chunk % sizes.pp == stage:
            found += experts[first : first + layers]
        first += layers
    return found


def engine_weight_bytes(arch: Architecture, layout: EngineLayout, itemsize: int = 2) -> int:
    """Of one rank of an engine that stores what the checkpoint stores."""
    return itemsize * sum(prod(shape) for shape in engine_shapes(weight_map(arch).values(), layout).values())


def kv_bytes_per_token(arch: Architecture, tp: int) -> int:
    """Of one engine rank, in bf16; latents are on every rank whole."""
    if arch.latent:
        return 2 * arch.num_layers * (arch.latent.kv_rank + arch.latent.rotated_dim)
    return 2 * arch.num_layers * 2 * max(1, arch.num_kv_heads // tp) * arch.head_dim


def estimate(config: Config, arch: Architecture) -> Estimate:
    """Of a run of `train` that trains the whole model on the cluster that the configuration describes (cluster.gpu, gpus_per_node).

    The engines are in bf16.
    """
    megatron, engine, card = config.megatron, config.rollout.engine, GPUS[config.cluster.gpu].memory
    colocated = config.cluster.placement == Placement.colocated
    takes_turns = colocated and megatron.sleep
    with_reference = config.algorithm.use_kl_loss or config.algorithm.use_kl_in_reward
    stages = [
        (state, activations(arch, config, stage), state.parameters if with_reference else 0)
        for stage, state in enumerate(training_states(arch, megatron))
    ]

    def resident(state: TrainingState, reference: int) -> int:
        optimizer = 0 if config.optimizer.offload else state.optimizer
        return state.parameters + state.gradients + optimizer + (0 if config.ref.offload else reference) + RANK_OVERHEAD

    weights = engine_weight_bytes(arch, EngineLayout(engine.tensor_parallel))
    pool = int(engine.mem_fraction * card)
    beside = ENGINE_OVERHEAD if takes_turns else pool + ENGINE_OVERHEAD if colocated else 0
    state, active, reference = max(stages, key=lambda stage: resident(stage[0], stage[2]) + stage[1] + stage[0].workspaces)
    fullest = max(resident(state, reference) for state, _, reference in stages)
    stepping = max(s.parameters + s.gradients + s.optimizer + (0 if config.ref.offload else r) for s, _, r in stages)
    asleep = RANK_OVERHEAD if takes_turns else fullest if colocated else 0
    on_host = max(
        (s.parameters if megatron.sleep else 0)
        + (s.optimizer if megatron.sleep or config.optimizer.offload else 0)
        + (r if config.ref.offload else 0)
        for s, _, r in stages
    )
    return Estimate(
        state=state,
        activations=active,
        training=resident(state, reference) + state.workspaces + active + beside,
        stepping=stepping + RANK_OVERHEAD + beside,
        syncing=fullest + (weights + ENGINE_OVERHEAD if takes_turns else beside),
        serving=pool + ENGINE_OVERHEAD + asleep,
        engine_weights=weights,
        kv_tokens=max(0, pool - weights) // kv_bytes_per_token(arch, engine.tensor_parallel),
        host=on_host * config.cluster.gpus_per_node,
    )
