"""Configurations of actors, made from what differs between tests."""

from dataclasses import fields, replace

from grpo_megatron.config.algorithm import AlgorithmConfig
from grpo_megatron.config.run import RunConfig
from grpo_megatron.config.schema import (
    Config,
    MegatronConfig,
    ModelConfig,
    OptimizerConfig,
    Precision,
    TrainConfig,
    TransformerImpl,
)
from grpo_megatron.model.parallel_sizes import ParallelSizes

SECTIONS = {field.name for field in fields(Config)}


def actor_config(
    model: str,
    sizes: ParallelSizes = ParallelSizes(),
    optimizer: OptimizerConfig | None = None,
    precision: Precision = Precision.fp32,
    with_reference: bool = False,
    pack_tokens: int = 0,
    **options,
) -> Config:
    """Return the configuration of an actor with local layers.

    model: folder of the HF checkpoint.
    with_reference: hold a reference model.
    pack_tokens: if not 0, every micro-batch is padded to this many tokens, over all CP ranks.
    options: settings of the section megatron, and whole sections by their names.
    """
    sections = {
        "run": RunConfig(seed=0),
        "model": ModelConfig(path=str(model)),
        "optimizer": optimizer or OptimizerConfig(),
        "algorithm": AlgorithmConfig(use_kl_loss=with_reference),
    }
    if pack_tokens:
        each = pack_tokens // sizes.cp
        sections["train"] = TrainConfig(constant_length_packs=True, max_tokens_per_micro_batch=each)
    sections |= {name: options.pop(name) for name in SECTIONS & options.keys()}
    layers = {"precision": precision, "transformer_impl": TransformerImpl.local}
    return Config(megatron=MegatronConfig(**sizes.settings() | layers | options), **sections)


def with_megatron(config: Config, **settings) -> Config:
    """Return the configuration with other settings of the section megatron."""
    return replace(config, megatron=replace(config.megatron, **settings))


def sizes_of(config: Config) -> ParallelSizes:
    """Return the parallel sizes of the trainer."""
    return ParallelSizes.from_config(config.megatron)
