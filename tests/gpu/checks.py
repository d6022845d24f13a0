"""Functions that the tests of this folder run in the process of a rank."""

import os
from dataclasses import dataclass

import numpy as np
import torch

from grpo_megatron.algorithm.losses import PolicyLoss
from grpo_megatron.batch.schedule import schedule
from grpo_megatron.batch.train_batch import TrainBatch
from grpo_megatron.cluster.memory import anonymous_bytes
from grpo_megatron.config.fp8 import FP8Config
from grpo_megatron.config.schema import Config, OptimizerConfig, Precision, TransformerImpl
from grpo_megatron.megatron.actor import Actor
from grpo_megatron.megatron.state.hf_weights import iterate_hf
from grpo_megatron.model.parallel_sizes import ParallelSizes
from tests.coefficients import token_weights
from tests.configs import actor_config
from tests.parallel.precisions import allowed_in_bf16, logprobs
from tests.streams import selected


def config_of(
    model: str,
    layers: TransformerImpl = TransformerImpl.local,
    emulated: bool = False,
    precision: Precision = Precision.bf16,
    fp8: FP8Config = FP8Config(),
) -> Config:
    return actor_config(
        model,
        ParallelSizes(),
        OptimizerConfig(lr=1e-3),
        precision,
        fp8=fp8,
        transformer_impl=layers,
        emulate_kernels=emulated,
    )


def logprobs_of(config: Config, batch: TrainBatch) -> np.ndarray:
    return logprobs(Actor(config), batch)


def exact_logprobs(model: str, batch: TrainBatch) -> tuple[np.ndarray, float]:
    """Return log-probs of the local layers in float32, and how far correct log-probs in bf16 may be from
    them.
    """
    torch.backends.cuda.matmul.allow_tf32 = False
    actor = Actor(config_of(model, precision=Precision.fp32))
    return logprobs(actor, batch), allowed_in_bf16(actor, batch)


@dataclass
class Trained:
    """The result of `train`.

    exported: weights before the first step.
    changed: names of the HF tensors that training changed.
    before, after: log-probs.
    """

    exported: dict[str, torch.Tensor]
    changed: list[str]
    before: np.ndarray
    after: np.ndarray


def train(config: Config, batch: TrainBatch, steps: int = 3) -> Trained:
    """Train on samples that all have a positive advantage, so that their probability must rise."""
    actor = Actor(config)
    exported = _weights(actor)
    batch.weight = token_weights(batch, "token-mean", 40)
    batch.advantage = batch.loss_mask.astype(np.float32)
    parts = [selected(batch, part) for part in schedule(batch.lengths, 256).micro_batches[0]]
    before = logprobs(actor, batch)
    for _ in range(steps):
        result = actor.passes.train_step(parts, PolicyLoss(), batch.num_tokens, current_is_old=True)
        assert not result.dropped
        assert np.isfinite(result.grad_norm)
    after = _weights(actor)
    changed = [name for name in exported if not torch.equal(exported[name], after[name])]
    return Trained(exported, changed, before, logprobs(actor, batch))


def _weights(actor: Actor) -> dict[str, torch.Tensor]:
    tensors = iterate_hf(actor.model.chunks, actor.model.entries)
    return {name: tensor.to("cpu", copy=True) for name, tensor in tensors}


def occupied() -> int:
    """Return the bytes of the device's memory that are in use, or those of this process if there is no
    device.
    """
    if not torch.cuda.is_available():
        return anonymous_bytes(os.getpid())
    free, total = torch.cuda.mem_get_info()
    return total - free


def sleep(config: Config, batch: TrainBatch, cycles: int) -> tuple[int, list[int], list[np.ndarray]]:
    """Let an actor sleep and wake `cycles` times.

    Returns the bytes of weights, gradients and optimizer states, the bytes occupied in each sleep, and the
    log-probs before and after each.
    """
    actor = Actor(config)
    parts = [selected(batch, part) for part in schedule(batch.lengths, 256).micro_batches[0]]
    batch.weight = token_weights(batch, "token-mean", 40)
    batch.advantage = batch.loss_mask.astype(np.float32)
    actor.passes.train_step(parts, PolicyLoss(), batch.num_tokens, current_is_old=True)
    resident = sum(actor.model.memory.resident().values())
    asleep, values = [], [logprobs(actor, batch)]
    for _ in range(cycles):
        report = actor.memory.sleep()["asleep"]
        assert report["parameters"] == report["gradients"] == report["optimizer"] == 0
        asleep.append(occupied())
        actor.memory.wake()
        values.append(logprobs(actor, batch))
    return resident, asleep, values
