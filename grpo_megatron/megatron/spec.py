"""What goes into an Actor and comes out of a step; light, because the driver imports it too."""

from dataclasses import dataclass, field

import torch

from grpo_megatron.config.schema import MoEConfig, OptimizerConfig, Precision, Recompute, TransformerImpl
from grpo_megatron.megatron.parallel import ParallelSizes
from grpo_megatron.metrics import Metrics


@dataclass(frozen=True)
class ModelSpec:
    """How a model is built from its Architecture.

    params_dtype: of parameters and activations. transformer_engine: its layers, else the local ones.
    aux_loss_coeff, z_loss_coeff: of the routers' own losses, 0: off. constant_length: all packs are
    equally long, so that pipeline stages need not tell each other the shapes.
    """

    sizes: ParallelSizes
    params_dtype: torch.dtype
    transformer_engine: bool = False
    fp8: bool = False
    recompute: Recompute = Recompute.none
    recompute_modules: tuple[str, ...] = ("core_attn",)
    aux_loss_coeff: float = 0.0
    z_loss_coeff: float = 0.0
    constant_length: bool = False


@dataclass(frozen=True)
class ActorSpec:
    """What an actor is made of.

    temperature: of the distribution whose log-probs are trained. reference_offload: the reference's
    weights wait in the host's memory. offload_folder: where what is parked goes, see memory.Parking.
    pack_tokens: if not 0, every micro-batch is padded to this many tokens, over all CP ranks.
    """

    model_path: str
    sizes: ParallelSizes
    optimizer: OptimizerConfig
    precision: Precision = Precision.fp32
    transformer_impl: TransformerImpl = TransformerImpl.local
    distributed_optimizer: bool = False
    overlap: bool = False
    recompute: Recompute = Recompute.none
    recompute_modules: tuple[str, ...] = ("core_attn",)
    moe: MoEConfig = field(default_factory=MoEConfig)
    temperature: float = 1.0
    with_reference: bool = False
    reference_path: str | None = None
    reference_offload: bool = True
    offload_folder: str | None = None
    pack_tokens: int = 0


@dataclass(frozen=True)
class TrainResult:
    """What one optimizer step did; metrics of this data-parallel replica, floats inside.

    beyond: one sentence for each of the loss's limits that was exceeded, over all replicas.
    """

    grad_norm: float
    lr: float
    dropped: bool
    metrics: Metrics
    beyond: tuple[str, ...] = ()
