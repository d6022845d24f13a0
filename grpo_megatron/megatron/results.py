"""Results of the ranks' passes. The driver imports this module too, so it must not import Megatron."""

from dataclasses import dataclass

from grpo_megatron.batch.sums import SequenceSums
from grpo_megatron.metrics import Metrics


@dataclass(frozen=True)
class Measurement:
    """Result of measuring one mini-batch before training: sums over each sequence, and metrics.

    MiniBatches.measure returns it, on one rank of each data-parallel replica.
    """

    sums: SequenceSums
    """Sums over the tokens of each of the replica's sequences, in the order of its micro-batches."""
    metrics: Metrics
    """Metrics of the mismatch between the log-probs of engine and trainer, and of its correction.

    Empty unless train.old_logprobs=recompute: the trainer's log-probs are not known before training then.
    """
    has_nan: bool
    """True if a log-prob of the old policy or of the reference is NaN."""


@dataclass(frozen=True)
class StepOutcome:
    """Result of an optimizer step.

    grad_norm: gradient norm before clipping, over all ranks.
    lr: learning rate of the step.
    dropped: True if the step was not taken, so that weights, moments and learning rate did not change. The
        reason is that the gradient norm was not finite or above optimizer.max_grad_norm_to_step, or that the
        caller asked for it (Optimizer.step with drop=True).
    """

    grad_norm: float
    lr: float
    dropped: bool


@dataclass(frozen=True)
class TrainResult(StepOutcome):
    """Result of an optimizer step and of the training passes before it.

    One rank of each data-parallel replica returns it.
    """

    metrics: Metrics
    """Metrics of this data-parallel replica, as Python numbers instead of tensors."""
    beyond: tuple[str, ...] = ()
    """One sentence for each metric whose value over all replicas exceeded its limit (TokenLoss.limits)."""
    occupied: int = 0
    """Bytes of GPU memory (without a GPU: host memory) that the process of this rank has reserved."""


@dataclass(frozen=True)
class AdamOptions:
    """Options of Adam for one optimizer step. None: the value of the configuration, or of its schedule."""

    lr: float | None = None
    """Learning rate."""
    beta1: float | None = None
    """Decay of the first moment."""
    beta2: float | None = None
    """Decay of the second moment."""
    eps: float | None = None
    """Number that is added to the root of the second moment."""
    weight_decay: float | None = None
    """Decoupled weight decay."""
    clip_grad: float | None = None
    """Largest gradient norm; a larger gradient is scaled down to it. 0: no limit."""
