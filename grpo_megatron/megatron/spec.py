"""What goes into an Actor and comes out of a step; light, because the driver imports it too."""

from dataclasses import dataclass

from grpo_megatron.config.schema import OptimizerConfig, Precision, TransformerImpl
from grpo_megatron.megatron.parallel import ParallelSizes
from grpo_megatron.metrics import Metrics


@dataclass(frozen=True)
class ActorSpec:
    """What an actor is made of. temperature: of the distribution whose log-probs are trained."""

    model_path: str
    sizes: ParallelSizes
    optimizer: OptimizerConfig
    precision: Precision = Precision.fp32
    transformer_impl: TransformerImpl = TransformerImpl.local
    distributed_optimizer: bool = False
    overlap: bool = False
    temperature: float = 1.0
    with_reference: bool = False
    reference_path: str | None = None


@dataclass(frozen=True)
class TrainResult:
    """What one optimizer step did; metrics of this data-parallel replica, floats inside."""

    grad_norm: float
    lr: float
    dropped: bool
    metrics: Metrics
