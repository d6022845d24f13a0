"""Memory of a trainer rank that lasts from step to step: parameters, gradients and optimizer states.

The bytes are counted from the weight map and the layout. They are exact except for the padding of buffers.
"""

from collections import Counter
from dataclasses import dataclass
from functools import cache
from math import prod

from grpo_megatron.config.schema import MegatronConfig, Precision
from grpo_megatron.model.architecture import Architecture
from grpo_megatron.model.families import weight_map
from grpo_megatron.model.parallel_sizes import ParallelSizes
from grpo_megatron.weights.sync.ranks import TrainerRanks


@dataclass(frozen=True)
class TrainingState:
    """GPU memory of a trainer rank that lasts from step to step, in bytes.

    parameters: the rank's shard of the model.
    gradients: float32 gradients of these parameters.
    optimizer: Adam's two moments, and float32 master weights unless the parameters are float32.
    workspaces: FP8 copies of the weights, plain and transposed.
    """

    parameters: int
    gradients: int
    optimizer: int
    workspaces: int = 0


def itemsize(megatron: MegatronConfig) -> int:
    """Return the bytes of one element of the trainer's parameters and activations: 4 for fp32, else 2."""
    return 4 if megatron.precision == Precision.fp32 else 2


def training_states(arch: Architecture, megatron: MegatronConfig) -> list[TrainingState]:
    """Return one TrainingState for each pipeline stage, which holds for every rank of the stage.

    The whole model is trained, without LoRA. Mixed precision follows arXiv:1710.03740, with Adam: parameters
    in bf16; gradients, two moments and a master copy in float32. The distributed optimizer (ZeRO stage 1,
    arXiv:1910.02054 section 5) splits moments and master copy over the replicas.
    """
    sizes = ParallelSizes.from_config(megatron)
    size, fp8 = itemsize(megatron), megatron.precision == Precision.fp8
    # float32 parameters need no master copy.
    per_element = 8 if size == 4 else 12
    replicas, expert_replicas = sizes.dp * sizes.cp, sizes.tp * sizes.cp * sizes.dp // (sizes.ep * sizes.etp)
    if not megatron.distributed_optimizer:
        replicas = expert_replicas = 1
    found = []
    for dense, experts in stage_elements(arch, sizes):
        elements, owned = dense + experts, dense // replicas + experts // expert_replicas
        found.append(
            TrainingState(size * elements, 4 * elements, per_element * owned, 2 * elements if fp8 else 0)
        )
    return found


@cache
def stage_elements(arch: Architecture, sizes: ParallelSizes) -> tuple[tuple[int, int], ...]:
    """Return, for each pipeline stage, the number of parameters (elements) on one of its ranks.

    Each item is (number of parameters outside experts, number of parameters of experts).
    """
    dense, experts = [0] * sizes.pp, [0] * sizes.pp
    stage_of_layer = [
        chunk % sizes.pp
        for chunk, layers in enumerate(sizes.chunk_layers(arch.num_layers))
        for _ in range(layers)
    ]
    for (place, of_expert), elements in _elements(arch, sizes.tp, sizes.etp, sizes.pp == 1).items():
        stage = {"first": 0, "last": sizes.pp - 1}[place] if isinstance(place, str) else stage_of_layer[place]
        (experts if of_expert else dense)[stage] += elements
    return tuple((plain, expert // sizes.ep) for plain, expert in zip(dense, experts, strict=True))


@cache
def _elements(arch: Architecture, tp: int, etp: int, one_stage: bool) -> Counter:
    """Count the parameters of one tensor-parallel shard: {(location, is expert): number of elements}.

    location: a layer index, or `first` for the pipeline stage with the embedding, or `last` for the stage
        with the output layer.
    is expert: True for the parameters of all experts of the layer together, False for all others.

    The result is cached because a layout search needs it again for every number of stages, replicas and
    expert-parallel ranks.

    tp, etp: tensor-parallel sizes outside and inside of experts.
    one_stage: True if the model has one pipeline stage, so that a tied output layer takes no memory of its
        own.
    """
    ranks, found = TrainerRanks(ParallelSizes(tp=tp, etp=etp), arch.num_layers), Counter()
    for entry in _map(arch).values():
        if not entry.exported and one_stage:
            continue  # the tied output layer is the embedding itself
        place: str | int = "last"
        if entry.megatron.startswith("embedding."):
            place = "first"
        elif entry.megatron.startswith("decoder.layers."):
            place = int(entry.megatron.split(".", 3)[2])
        found[place, entry.expert is not None] += prod(entry.megatron_shape(ranks.shards(entry)))
    return found


_map = cache(weight_map)
