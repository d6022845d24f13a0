"""Rules about training with any algorithm: batches, sequences, routing, learning rate, timeouts."""

from collections.abc import Iterator

from grpo_megatron.batch.layout import Layout, padded_to
from grpo_megatron.config.command import Command
from grpo_megatron.config.derived import lr_decay_steps
from grpo_megatron.config.schema import Config, LrSchedule, OldLogprobs, RoutingReplay
from grpo_megatron.model.parallel_sizes import ParallelSizes
from grpo_megatron.preflight.rule import RuleBook

# Each check takes a Config.
TRAINING = RuleBook()

_TRAIN = ("train",)


@TRAINING.rule(
    "Mini-batches share the prompts of a step evenly.",
    "train.ppo_mini_batch_size",
    "data.train_batch_size",
    commands=_TRAIN,
)
def mini_batch_divides(config: Config) -> Iterator[str]:
    batch, mini = config.data.train_batch_size, config.train.ppo_mini_batch_size
    if batch % mini:
        yield f"train.ppo_mini_batch_size={mini} does not divide data.train_batch_size={batch}"


@TRAINING.rule(
    "Old log-probs from the training forward are those of the old policy only in its first optimizer step.",
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
        yield (
            "train.old_logprobs=current is exact only with one optimizer step per batch: set "
            "train.ppo_epochs=1 and train.ppo_mini_batch_size = data.train_batch_size, or choose recompute "
            "or rollout"
        )


_SHARING = (
    "megatron.data_parallel",
    "megatron.pipeline_parallel",
    "megatron.virtual_pipeline",
    "train.packing",
)


@TRAINING.rule(
    "Every data-parallel replica gets at least one micro-batch of an optimizer step, with interleaved stages "
    "one for each stage.",
    "train.ppo_mini_batch_size",
    "rollout.n",
    *_SHARING,
    commands=_TRAIN,
)
def samples_can_be_shared(config: Config) -> Iterator[str]:
    samples = config.train.ppo_mini_batch_size * config.rollout.n
    yield from _sharing(config, f"train.ppo_mini_batch_size * rollout.n = {samples} samples", samples)


@TRAINING.rule(
    "Every data-parallel replica gets at least one micro-batch of examples, with interleaved stages one for "
    "each stage.",
    "data.train_batch_size",
    *_SHARING,
    commands=("sft",),
)
def examples_can_be_shared(config: Config) -> Iterator[str]:
    examples = config.data.train_batch_size
    yield from _sharing(config, f"data.train_batch_size={examples} examples", examples)


@TRAINING.rule(
    "Every data-parallel replica gets at least one micro-batch of pairs, with interleaved stages one for "
    "each stage.",
    "data.train_batch_size",
    *_SHARING,
    commands=("reward-model",),
)
def pairs_can_be_shared(config: Config) -> Iterator[str]:
    pairs = config.data.train_batch_size
    yield from _sharing(config, f"data.train_batch_size={pairs} pairs", pairs)


@TRAINING.rule(
    "A micro-batch can hold both sequences of a pair, over all context-parallel ranks and with their "
    "padding.",
    "train.max_tokens_per_micro_batch",
    "data.max_prompt_length",
    "rollout.max_response_length",
    "megatron.context_parallel",
    commands=("reward-model",),
)
def longest_pair_fits(config: Config) -> Iterator[str]:
    longest, cp = (
        config.data.max_prompt_length + config.rollout.max_response_length,
        config.megatron.context_parallel,
    )
    limit = config.train.max_tokens_per_micro_batch
    if limit * cp < 2 * padded_to(longest, Layout(cp=cp).sequence_multiple):
        times = f" on each of megatron.context_parallel={cp} ranks" if cp > 1 else ""
        yield (
            f"train.max_tokens_per_micro_batch={limit}{times} is less than two of the longest sequences of a "
            f"pair, data.max_prompt_length + rollout.max_response_length = {longest} each"
        )


def _sharing(config: Config, what: str, count: int) -> Iterator[str]:
    """Yield a violation if the data-parallel replicas cannot share the samples of an optimizer step.

    what: the samples in words, for the message.
    count: number of samples.
    """
    sizes, packing = ParallelSizes.from_config(config.megatron), config.train.packing
    step = sizes.dp * sizes.micro_batch_multiple
    if count < step or (not packing and count % step):
        yield (
            f"{what} cannot be shared by megatron.data_parallel={sizes.dp} ranks"
            + (
                f" in multiples of megatron.pipeline_parallel={sizes.pp} micro-batches"
                if step > sizes.dp
                else ""
            )
            + ("" if packing else " in equal numbers, which train.packing=false needs")
        )


@TRAINING.rule(
    "A micro-batch can hold the longest sequence, over all context-parallel ranks and with their padding.",
    "train.max_tokens_per_micro_batch",
    "data.max_prompt_length",
    "rollout.max_response_length",
    "megatron.context_parallel",
    commands=_TRAIN,
)
def longest_sequence_fits(config: Config) -> Iterator[str]:
    longest, cp = (
        config.data.max_prompt_length + config.rollout.max_response_length,
        config.megatron.context_parallel,
    )
    limit, multiple = config.train.max_tokens_per_micro_batch, Layout(cp=cp).sequence_multiple
    if limit * cp < padded_to(longest, multiple):
        times = f" on each of megatron.context_parallel={cp} ranks" if cp > 1 else ""
        yield (
            f"train.max_tokens_per_micro_batch={limit}{times} is less than the longest sequence, "
            f"data.max_prompt_length + rollout.max_response_length = {longest}"
        )


@TRAINING.rule(
    "The old policy's routing is known from the trainer's pass for the old log-probs.",
    "moe.routing_replay",
    "train.old_logprobs",
    commands=_TRAIN,
)
def old_routing_has_its_pass(config: Config) -> Iterator[str]:
    if (
        config.moe.routing_replay == RoutingReplay.old_policy
        and config.train.old_logprobs != OldLogprobs.recompute
    ):
        yield (
            "moe.routing_replay=old_policy reuses the routing of the pass for the old log-probs: it needs "
            "train.old_logprobs=recompute"
        )


@TRAINING.rule("The learning rate does not fall to a higher one.", "optimizer.lr_min", "optimizer.lr")
def lr_falls(config: Config) -> Iterator[str]:
    optimizer = config.optimizer
    if optimizer.lr_min > optimizer.lr:
        yield f"optimizer.lr_min={optimizer.lr_min} is more than optimizer.lr={optimizer.lr}"


@TRAINING.rule(
    "The wsd schedule needs the length of its decay.", "optimizer.lr_schedule", "optimizer.wsd_decay_steps"
)
def wsd_has_a_decay(config: Config) -> Iterator[str]:
    if config.optimizer.lr_schedule == LrSchedule.wsd and config.optimizer.wsd_decay_steps is None:
        yield "optimizer.lr_schedule=wsd needs optimizer.wsd_decay_steps, the length of its decay"


_SCHEDULE = (
    "optimizer.lr_warmup_steps",
    "optimizer.wsd_decay_steps",
    "optimizer.lr_schedule",
    "optimizer.lr_decay_steps",
    "run.total_steps",
)
_PARTS_FIT = "Warm-up and decay together are no longer than the schedule."


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
    """Yield a violation if warm-up and decay together are longer than the learning rate schedule.

    steps: optimizer steps of the whole schedule.
    """
    optimizer = config.optimizer
    if optimizer.lr_schedule == LrSchedule.constant:
        return
    whole = (
        f"the {steps} steps of the schedule (optimizer.lr_decay_steps; null: all optimizer steps of the run)"
    )
    warmup, decay = optimizer.lr_warmup_steps, optimizer.wsd_decay_steps
    if warmup > steps:
        yield f"optimizer.lr_warmup_steps={warmup} is more than {whole}"
    elif optimizer.lr_schedule == LrSchedule.wsd and decay is not None and decay + warmup > steps:
        yield (
            f"optimizer.wsd_decay_steps={decay} after optimizer.lr_warmup_steps={warmup} is more than {whole}"
        )


@TRAINING.rule(
    "A hang is found before those who wait for it give up, whose errors would not say for whom they waited.",
    "cluster.hang_timeout",
    "megatron.collective_timeout",
    "weight_sync.timeout",
)
def hangs_are_found_first(config: Config) -> Iterator[str]:
    waits = {
        "megatron.collective_timeout": config.megatron.collective_timeout,
        "weight_sync.timeout": config.weight_sync.timeout,
    }
    for name, longest in waits.items():
        if longest <= config.cluster.hang_timeout:
            yield f"cluster.hang_timeout={config.cluster.hang_timeout:g} must be less than {name}={longest:g}"
