"""Actors with random weights, and batches for them."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from train_step import batch_of, gsm8k_like_lengths, part_of

from grpo_megatron.batch.schedule import schedule
from grpo_megatron.batch.train_batch import TrainBatch
from grpo_megatron.config.fp8 import FP8Config, FP8Recipe
from grpo_megatron.config.schema import Config, MegatronConfig, ModelConfig, OptimizerConfig, Precision
from grpo_megatron.megatron import process_groups
from grpo_megatron.megatron.actor import Actor
from grpo_megatron.megatron.state.hf_weights import local_weights
from grpo_megatron.megatron.trained_model import TrainedModel
from grpo_megatron.model.parallel_sizes import ParallelSizes
from on_gpu.bench import Bench, Sizes, random_weights

# name -> settings of the section megatron
PRECISIONS = {
    "bf16": {"precision": Precision.bf16},
    "fp8_tensorwise": {"precision": Precision.fp8, "fp8": FP8Config(recipe=FP8Recipe.tensorwise)},
    "fp8_delayed": {"precision": Precision.fp8, "fp8": FP8Config(recipe=FP8Recipe.delayed)},
    "fp8_blockwise": {"precision": Precision.fp8, "fp8": FP8Config(recipe=FP8Recipe.blockwise)},
}


class RandomModel(TrainedModel):
    """A model with random weights. Its folder needs only a config.json."""

    @torch.no_grad()
    def _load(self, folder: str) -> None:
        random_weights(local_weights(self.chunks))


def random_actor(config: Config) -> Actor:
    return Actor(config, build=RandomModel)


@contextmanager
def one_rank() -> Iterator[None]:
    """Make this process the only rank within the context."""
    with tempfile.TemporaryDirectory() as folder:
        process_groups.initialize(ParallelSizes(), 0, f"file://{folder}/store", seed=0)
        try:
            yield
        finally:
            process_groups.destroy()


def config_of(bench: Bench, folder: str, precision: str = "bf16") -> Config:
    """Return the actor's configuration. TransformerEngine's layers are used if they are installed."""
    megatron = MegatronConfig(emulate_kernels=bench.options.dry_run, **PRECISIONS[precision])
    return Config(model=ModelConfig(path=folder), megatron=megatron, optimizer=OptimizerConfig(lr=1e-6))


def problem_of(bench: Bench, precision: str) -> str | None:
    """Return why this precision cannot be measured, or None if it can."""
    return None if precision == "bf16" else bench.here.fp8_problem


def batches(sizes: Sizes, vocab_size: int) -> dict[str, TrainBatch]:
    """Return two batches with about as many tokens.

    gsm8k: short sequences, many in a micro-batch.
    long: each sequence fills a micro-batch.
    """
    rng = np.random.default_rng(0)
    words = range(vocab_size)
    total = sizes.tokens * sizes.micro_batches
    prompts, responses = gsm8k_like_lengths(total, rng)
    responses = responses.clip(max=sizes.tokens - prompts.max())
    # Slightly fewer tokens, so that they fit into the same number of micro-batches.
    count = int(np.searchsorted(np.cumsum(prompts + responses), 0.97 * total))
    long = (
        np.full(sizes.micro_batches, sizes.tokens // 8),
        np.full(sizes.micro_batches, sizes.tokens - sizes.tokens // 8),
    )
    old_logp = -float(np.log(vocab_size))
    return {
        "gsm8k": batch_of(prompts[:count], responses[:count], rng, words, old_logp),
        "long": batch_of(*long, rng, words, old_logp),
    }


def micro_batches(batch: TrainBatch, actor: Actor, tokens: int) -> list[TrainBatch]:
    plan = schedule(batch.lengths, tokens, cost=actor.model.arch.cost_model)
    return [part_of(batch, part) for part in plan.micro_batches[0]]
