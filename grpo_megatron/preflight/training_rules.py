"""Rules about training with any algorithm: batches, sequences, routing, learning rate, timeouts."""

from collections.abc import Iterator

from grpo_megatron.batch.layout import Layout, padded_to
from grpo_megatron.config.command import Command
from grpo_megatron.config.derived import lr_decay_steps
from grpo_megatron.config.schema import Config, LrSchedule, OldLogprobs
from grpo_megatron.model.parallel_sizes import ParallelSizes
from grpo_megatron.preflight.rule import TRAINING_COMMANDS, RuleBook, at_most, divides, needs, shown

_TRAIN = ("train",)

# Each check takes a Config.
TRAINING = RuleBook(
    divides("train.ppo_mini_batch_size", "data.train_batch_size"),
    needs(
        "moe.routing_replay=old_policy",
        "train.old_logprobs=recompute",
        "old_policy reuses the routing of the pass that computes the old log-probs",
    ),
    at_most("optimizer.lr_min", "optimizer.lr", commands=TRAINING_COMMANDS),
    needs(
        "optimizer.lr_schedule=wsd",
        "optimizer.wsd_decay_steps",
        "this key sets the length of the decay",
        commands=TRAINING_COMMANDS,
    ),
)


@TRAINING.rule(
    "train.old_logprobs=current needs one optimizer step per batch: train.ppo_epochs must be 1, and "
    "train.ppo_mini_batch_size must equal data.train_batch_size.",
    "train.old_logprobs",
    "train.ppo_epochs",
    "train.ppo_mini_batch_size",
    "data.train_batch_size",
    commands=_TRAIN,
)
def current_logprobs_are_of_one_step(config: Config) -> Iterator[str]:
    train = config.train
    one_step = train.ppo_mini_batch_size == config.data.train_batch_size and train.ppo_epochs == 1
    if train.old_logprobs == OldLogprobs.current and not one_step:
        yield shown(config, "train.ppo_epochs", "train.ppo_mini_batch_size", "data.train_batch_size")


_SHARING = (
    "megatron.data_parallel",
    "megatron.pipeline_parallel",
    "megatron.virtual_pipeline",
    "train.packing",
)


_EACH_GETS_ONE = (
    "every one of the megatron.data_parallel replicas must get at least one micro-batch, and with "
    "interleaved pipeline stages one for each stage; with train.packing=false all must get the same number."
)


@TRAINING.rule(
    f"Each optimizer step needs enough samples (train.ppo_mini_batch_size * rollout.n): {_EACH_GETS_ONE}",
    "train.ppo_mini_batch_size",
    "rollout.n",
    *_SHARING,
    commands=_TRAIN,
)
def samples_can_be_shared(config: Config) -> Iterator[str]:
    yield from _sharing(config, config.train.ppo_mini_batch_size * config.rollout.n)


@TRAINING.rule(
    f"data.train_batch_size must be large enough: {_EACH_GETS_ONE}",
    "data.train_batch_size",
    *_SHARING,
    commands=("sft", "reward-model"),
)
def examples_can_be_shared(config: Config) -> Iterator[str]:
    yield from _sharing(config, config.data.train_batch_size)


def _sharing(config: Config, count: int) -> Iterator[str]:
    """Yield the values for an error message if the trainer's replicas cannot share a step's samples.

    In each optimizer step, each data-parallel replica runs at least one micro-batch, or one for each pipeline
    stage with interleaved stages. The step needs a sample for each of these micro-batches. With
    train.packing=false, the number of samples must also be a multiple of the number of these micro-batches.

    count: number of samples of an optimizer step.
    """
    sizes, packing = ParallelSizes.from_config(config.megatron), config.train.packing
    step = sizes.dp * sizes.micro_batch_multiple
    if count < step or (not packing and count % step):
        wanted = f"at least {step}" if packing else f"a multiple of {step}"
        yield f"there are {count}, but {wanted} are needed; megatron.data_parallel={sizes.dp}"


_LENGTHS = (
    "train.max_tokens_per_micro_batch",
    "data.max_prompt_length",
    "rollout.max_response_length",
    "megatron.context_parallel",
)


@TRAINING.rule(
    "train.max_tokens_per_micro_batch * megatron.context_parallel must be at least the length of the "
    "longest sequence: data.max_prompt_length + rollout.max_response_length, with padding.",
    *_LENGTHS,
    commands=_TRAIN,
)
def longest_sequence_fits(config: Config) -> Iterator[str]:
    yield from _fits(config, sequences=1)


@TRAINING.rule(
    "train.max_tokens_per_micro_batch * megatron.context_parallel must be at least twice the length of the "
    "longest sequence: data.max_prompt_length + rollout.max_response_length, with padding.",
    *_LENGTHS,
    commands=("reward-model",),
)
def longest_pair_fits(config: Config) -> Iterator[str]:
    yield from _fits(config, sequences=2)


def _fits(config: Config, sequences: int) -> Iterator[str]:
    """Yield the values for an error message if a micro-batch has no room for sequences of maximum length.

    sequences: number of sequences of maximum length that a micro-batch must hold.
    """
    longest = config.data.max_prompt_length + config.rollout.max_response_length
    cp, limit = config.megatron.context_parallel, config.train.max_tokens_per_micro_batch
    if limit * cp < sequences * padded_to(longest, Layout(cp=cp).sequence_multiple):
        yield f"{shown(config, *_LENGTHS)}; the longest sequence has {longest} tokens"


_SCHEDULE = (
    "optimizer.lr_warmup_steps",
    "optimizer.wsd_decay_steps",
    "optimizer.lr_schedule",
    "optimizer.lr_decay_steps",
    "run.total_steps",
)
_PARTS_FIT = (
    "optimizer.lr_warmup_steps, plus optimizer.wsd_decay_steps with lr_schedule=wsd, must not exceed the "
    "length of the schedule (optimizer.lr_decay_steps, by default all optimizer steps of the run)."
)


@TRAINING.rule(
    _PARTS_FIT,
    *_SCHEDULE,
    "data.train_batch_size",
    "train.ppo_mini_batch_size",
    "train.ppo_epochs",
    commands=_TRAIN,
)
def schedule_of_train_fits(config: Config) -> Iterator[str]:
    yield from _schedule_fits(config, lr_decay_steps(config, Command.train))


@TRAINING.rule(_PARTS_FIT, *_SCHEDULE, commands=("sft", "reward-model"))
def schedule_of_sft_fits(config: Config) -> Iterator[str]:
    yield from _schedule_fits(config, lr_decay_steps(config, Command.sft))


def _schedule_fits(config: Config, steps: int) -> Iterator[str]:
    """Check that warm-up and decay of the learning rate together fit the schedule.

    If they do not, yield the settings and the schedule's length, as text for an error message. A constant
    learning rate always fits.

    steps: length of the whole schedule, in optimizer steps.
    """
    optimizer = config.optimizer
    decay = (optimizer.wsd_decay_steps or 0) if optimizer.lr_schedule == LrSchedule.wsd else 0
    if optimizer.lr_schedule != LrSchedule.constant and optimizer.lr_warmup_steps + decay > steps:
        keys = ("optimizer.lr_warmup_steps", "optimizer.wsd_decay_steps")
        yield f"{shown(config, *keys)}; the schedule has {steps} steps"


@TRAINING.rule(
    "cluster.hang_timeout must be less than megatron.collective_timeout and weight_sync.timeout: otherwise "
    "the processes that wait for a hung one would give up first, and their errors would not name it.",
    "cluster.hang_timeout",
    "megatron.collective_timeout",
    "weight_sync.timeout",
)
def hangs_are_found_first(config: Config) -> Iterator[str]:
    if config.cluster.hang_timeout >= min(config.megatron.collective_timeout, config.weight_sync.timeout):
        yield shown(config, "cluster.hang_timeout", "megatron.collective_timeout", "weight_sync.timeout")
