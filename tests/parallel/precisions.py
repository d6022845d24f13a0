"""Difference of log-probs in bf16 from those in fp32, and its allowed size."""

from dataclasses import dataclass

import numpy as np
import torch

from grpo_megatron.batch.train_batch import TrainBatch
from grpo_megatron.config.schema import OptimizerConfig, Precision
from grpo_megatron.megatron.actor import Actor
from grpo_megatron.model.parallel_sizes import ParallelSizes
from tests.configs import actor_config, with_megatron
from tests.parallel.actors import in_order, micro_batches


@dataclass
class Errors:
    """Means over tokens of |difference of the log-prob|, in nats."""

    allowed: float
    sound: float
    faulty: float


def logprobs(actor: Actor, batch: TrainBatch) -> np.ndarray:
    """Return the log-probs of the only rank, float32 [T]."""
    plan, parts = micro_batches(batch, actor.config, 0, packing=True)
    return in_order(batch, plan, actor, actor.passes.logprobs(parts))


def mean_error(logp: np.ndarray, expected: np.ndarray) -> float:
    return float(np.abs(logp - expected).mean())


def allowed_in_bf16(actor: Actor, batch: TrainBatch) -> float:
    """Return the largest `mean_error` that a correct bf16 actor with the weights of this fp32 actor may have.

    It is twice the effect of rounding every layer's output to bf16, because weights and the sums in between
    are rounded as well. Correct actors were at 0.67 to 1.2 times that effect, on random models and batches of
    1,000 tokens. The bound is on the mean, and the batch must not be much smaller, because a token whose
    choice of experts flips may differ by two nats.
    """
    _, parts = micro_batches(batch, actor.config, 0, packing=True)
    exact, rounded = (
        actor.passes.probe(parts, actor.config.rollout.temperature, dtype)[0]
        for dtype in (None, torch.bfloat16)
    )
    return 2 * mean_error(rounded, exact)


def errors_in_bf16(model: str, batch: TrainBatch, expected: np.ndarray) -> Errors:
    """Return the errors of a correct actor, and of one with a fault: the norm before the first MLP is a tenth
    too large, or the norm after it, if there is one.

    expected: exact log-probs, float32 [T].
    """
    config = actor_config(model, ParallelSizes(), OptimizerConfig(), Precision.fp32)
    allowed = allowed_in_bf16(Actor(config), batch)
    actor = Actor(with_megatron(config, precision=Precision.bf16))
    sound = mean_error(logprobs(actor, batch), expected)
    decoder = actor.model.chunks[0].decoder
    layer = decoder.layers[0]
    last = getattr(layer.mlp, "linear_fc2", None)  # None: the MLP consists of experts
    weight = getattr(last, "norm", layer.pre_mlp_layernorm).weight.data
    # A zero-centred norm multiplies by 1 + weight.
    weight.add_(0.1 * (weight + 1 if decoder.config.layernorm_zero_centered_gamma else weight))
    return Errors(allowed, sound, faulty=mean_error(logprobs(actor, batch), expected))
