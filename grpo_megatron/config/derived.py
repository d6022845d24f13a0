"""Values that follow from several settings of the configuration."""

from dataclasses import replace

from grpo_megatron.config.command import Command
from grpo_megatron.config.engine import EngineConfig
from grpo_megatron.config.lora import LoraConfig
from grpo_megatron.config.reward import MODEL, functions_of
from grpo_megatron.config.rollout import RolloutConfig, Strategy
from grpo_megatron.config.schema import Config, Precision, Recompute
from grpo_megatron.config.weight_sync import LoraSync


def scores_on_ranks(config: Config) -> bool:
    """Return True if the trainer's ranks hold a frozen reward model beside the policy, to score samples.

    This is so if the reward function `model` is used. A run that replays recorded samples (rollout.replay)
    needs no reward model, because the samples have been scored already.
    """
    return MODEL in functions_of(config.reward) and not config.rollout.replay


def syncs_adapters(config: Config) -> bool:
    """Return True if only LoRA adapters are sent to the engines, which have the other weights already."""
    return config.megatron.lora.rank > 0 and config.weight_sync.lora == LoraSync.adapter


def scorer_config(config: Config) -> Config:
    """Return the configuration with which the ranks build the frozen reward model beside the policy.

    It is the configuration of the policy, without LoRA adapters and recomputation, and with bf16 in place of
    FP8. The reward model's layers are divided equally among the pipeline stages.
    """
    megatron = config.megatron
    precision = Precision.bf16 if megatron.precision == Precision.fp8 else megatron.precision
    own = replace(
        megatron, precision=precision, recompute=Recompute.none, pipeline_layers=[], lora=LoraConfig()
    )
    return replace(config, megatron=own)


def lr_decay_steps(config: Config, command: Command) -> int:
    """Return the length of the learning-rate schedule in optimizer steps, including the warm-up.

    The length is optimizer.lr_decay_steps if that is set, or else the number of optimizer steps of the run.

    command: the command of the run. A step of `train` has one optimizer step for each mini-batch and epoch
        (train.ppo_epochs); a step of the other commands has one.
    """
    if config.optimizer.lr_decay_steps is not None:
        return config.optimizer.lr_decay_steps
    if command != Command.train:
        return config.run.total_steps
    mini_batches = config.data.train_batch_size // max(1, config.train.ppo_mini_batch_size)
    return config.run.total_steps * mini_batches * config.train.ppo_epochs


def pack_limit(config: Config) -> int:
    """Return the maximum number of tokens of a micro-batch, summed over all context-parallel ranks."""
    return config.train.max_tokens_per_micro_batch * config.megatron.context_parallel


def most_engines(engine: EngineConfig) -> int:
    """Return the largest number of engines that a run may have while it grows.

    This is rollout.engine.max_engines, or num_engines if that is not set.
    """
    return engine.max_engines or engine.num_engines


def evaluation_rollout(config: Config) -> RolloutConfig:
    """Return the settings of section `rollout` with which the evaluation generates responses.

    Number of samples, temperature, top-p and maximum length come from section `eval`; all else is as in
    training. Beam search and top-k sampling are off.
    """
    rollout, own = config.rollout, config.eval
    return replace(
        rollout,
        n=own.n,
        strategy=Strategy.sampling,
        temperature=own.temperature,
        top_p=own.top_p,
        top_k=-1,
        max_response_length=own.max_response_length or rollout.max_response_length,
    )
