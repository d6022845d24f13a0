"""Values that follow from several settings of the configuration."""

from grpo_megatron.config.reward import MODEL, functions_of
from grpo_megatron.config.schema import Config


def scores_on_ranks(config: Config) -> bool:
    """Return True if the trainer's ranks hold a frozen reward model beside the policy.

    A run that replays recorded samples (rollout.replay) needs no reward model, because the samples have been
    scored already.
    """
    return MODEL in functions_of(config.reward) and not config.rollout.replay


def lr_decay_steps(config: Config, command: str) -> int:
    """Return the length of the learning-rate schedule in optimizer steps, including the warm-up.

    The length is optimizer.lr_decay_steps if that is set, and else the number of optimizer steps of the run.

    command: name of the command. With "train", a step of the run may have several optimizer steps. With any
        other command, it has one.
    """
    if config.optimizer.lr_decay_steps is not None:
        return config.optimizer.lr_decay_steps
    if command != "train":
        return config.run.total_steps
    mini_batches = config.data.train_batch_size // max(1, config.train.ppo_mini_batch_size)
    return config.run.total_steps * mini_batches * config.train.ppo_epochs


def pack_limit(config: Config) -> int:
    """Return the maximum number of tokens of a micro-batch, summed over all context-parallel ranks."""
    return config.train.max_tokens_per_micro_batch * config.megatron.context_parallel
