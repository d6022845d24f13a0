"""Rules about data, generation and environments."""

from collections.abc import Iterator
from dataclasses import fields
from typing import Any

from grpo_megatron.config.data import OverlongPrompts
from grpo_megatron.config.rollout import BeamConfig, GymnasiumConfig, HistoryKind, RolloutConfig, Strategy
from grpo_megatron.config.schema import Config, RoutingReplay
from grpo_megatron.data.tokenizer import NO_TEMPLATE
from grpo_megatron.errors import UserError
from grpo_megatron.preflight.rule import COMMANDS, ENGINE_COMMANDS, RuleBook
from grpo_megatron.rollout.environments import BUILT_IN, offered_tools

# Each check takes a Config.
ROLLOUT = RuleBook()

_TRAIN = ("train",)


@ROLLOUT.rule("Training prompts are given by a file, by hf:NAME, or by a list of these.", "data.train")
def training_data_is_named(config: Config) -> Iterator[str]:
    yield from _named("data.train", config.data.train)


@ROLLOUT.rule(
    "Held-out prompts are given by a file, by hf:NAME, or by a list of these.", "data.eval", commands=COMMANDS
)
def held_out_data_is_named(config: Config) -> Iterator[str]:
    yield from _named("data.eval", config.data.eval)


def _named(key: str, value: Any) -> Iterator[str]:
    names = value if isinstance(value, list) else [value]
    if value is not None and not all(isinstance(name, str) and name.strip() for name in names):
        yield f"{key} must be a file name, hf:NAME, or a list of them, is {value!r}"


@ROLLOUT.rule(
    "There is one weight for each training source, or none at all.", "data.train_weights", "data.train"
)
def weights_match_the_sources(config: Config) -> Iterator[str]:
    weights, sources = config.data.train_weights, config.data.train
    if weights and (not isinstance(sources, list) or len(weights) != len(sources)):
        yield (
            f"data.train_weights={weights} must be one positive number for each source in the list data.train"
        )


@ROLLOUT.rule(
    "Examples and preferences are trained on once per epoch, whatever file they come from.",
    "data.train_weights",
    commands=("sft", "reward-model"),
)
def examples_have_no_weights(config: Config) -> Iterator[str]:
    if config.data.train_weights:
        yield (
            f"data.train_weights={config.data.train_weights} is for prompts; sft and reward-model train on "
            "each record once per epoch. Remove it, and name a file in data.train as often as its records "
            "shall be seen"
        )


@ROLLOUT.rule(
    "Prompts come from a file, unless recorded samples take their place.",
    "data.train",
    "rollout.replay",
    commands=_TRAIN,
)
def there_are_prompts(config: Config) -> Iterator[str]:
    if not config.rollout.replay and not config.data.train:
        yield "data.train has no value: the file with the training prompts"


@ROLLOUT.rule(
    "Dynamic sampling takes the place of what filters drop.",
    "rollout.dynamic_sampling.enabled",
    "algorithm.filters",
    commands=_TRAIN,
)
def something_is_filtered(config: Config) -> Iterator[str]:
    if config.rollout.dynamic_sampling.enabled and not config.algorithm.filters:
        yield (
            "rollout.dynamic_sampling.enabled=true needs algorithm.filters, such as [nonzero_variance]: "
            "nothing is dropped without"
        )


@ROLLOUT.rule(
    "Training samples come from the model's full distribution, that of the log-probs.",
    "rollout.top_p",
    "rollout.top_k",
    commands=_TRAIN,
)
def sampling_is_of_the_full_distribution(config: Config) -> Iterator[str]:
    if config.rollout.top_p != 1.0 or config.rollout.top_k != -1:
        yield (
            "rollout.top_p and rollout.top_k must stay 1.0 and -1: the engine's log-probs are of the full "
            "distribution, which is then not the one that was sampled from"
        )


@ROLLOUT.rule(
    "A replayed run starts no engine that could answer held-out prompts.",
    "rollout.replay",
    "data.eval",
    commands=_TRAIN,
)
def replay_has_no_evaluation(config: Config) -> Iterator[str]:
    if config.rollout.replay and config.data.eval:
        yield "rollout.replay starts no engine, so there can be no evaluation: set data.eval=null"


@ROLLOUT.rule(
    "A run records samples or replays them, not both.", "rollout.record", "rollout.replay", commands=_TRAIN
)
def replay_is_not_recorded(config: Config) -> Iterator[str]:
    if config.rollout.replay and config.rollout.record:
        yield "rollout.record and rollout.replay exclude each other"


@ROLLOUT.rule(
    "A number of turns is that of an environment.",
    "rollout.max_turns",
    "rollout.environment",
    commands=ENGINE_COMMANDS,
)
def turns_have_an_environment(config: Config) -> Iterator[str]:
    rollout = config.rollout
    if rollout.environment is None and rollout.max_turns != RolloutConfig().max_turns:
        yield f"rollout.max_turns={rollout.max_turns} means nothing without rollout.environment"


@ROLLOUT.rule(
    "The environment is a built-in or registered one, or can be imported, and has all that it needs.",
    "rollout.environment",
    "rollout.gymnasium.id",
    "rollout.gymnasium.text",
    "rollout.tools",
    "reward.timeout",
    "reward.code.isolation",
    commands=(*ENGINE_COMMANDS, "sft"),
)
def environment_is_known(config: Config) -> Iterator[str]:
    try:
        offered_tools(config.rollout, config.reward)
    except UserError as error:
        yield str(error)


@ROLLOUT.rule(
    "Settings of a built-in environment go with that environment.",
    "rollout.environment",
    "rollout.tools",
    *(f"rollout.gymnasium.{field.name}" for field in fields(GymnasiumConfig)),
    commands=ENGINE_COMMANDS,
)
def settings_have_their_environment(config: Config) -> Iterator[str]:
    rollout, default = config.rollout, RolloutConfig()
    settings = [field.name for field in fields(GymnasiumConfig)]
    changed = {
        "tools": rollout.tools != default.tools,
        "gymnasium": any(
            getattr(rollout.gymnasium, name) != getattr(default.gymnasium, name) for name in settings
        ),
    }
    for name in BUILT_IN:
        if rollout.environment != name and changed[name]:
            yield f"rollout.{name} means nothing without rollout.environment={name}"


@ROLLOUT.rule(
    "What the chat template makes of an episode is that of whole chats.",
    "rollout.history",
    "rollout.environment",
    "data.chat_template",
    "data.overlong_prompts",
    commands=ENGINE_COMMANDS,
)
def template_history_has_its_template(config: Config) -> Iterator[str]:
    if config.rollout.history != HistoryKind.template:
        return
    if config.rollout.environment is None:
        yield "rollout.history=template means nothing without rollout.environment"
    if config.data.chat_template == NO_TEMPLATE:
        yield "rollout.history=template needs a chat template, but data.chat_template=none"
    if config.data.overlong_prompts == OverlongPrompts.truncate_left:
        yield (
            "rollout.history=template makes the prompt anew for each turn, from messages that "
            "data.overlong_prompts=truncate_left cannot shorten: use skip or error"
        )


@ROLLOUT.rule(
    "A beam search finds whole responses, of one turn, that end by tokens.",
    "rollout.strategy",
    "rollout.environment",
    "rollout.stop",
    "moe.routing_replay",
    commands=_TRAIN,
)
def beams_are_of_one_turn(config: Config) -> Iterator[str]:
    if config.rollout.strategy != Strategy.beam:
        return
    if config.rollout.environment is not None:
        yield (
            "rollout.strategy=beam searches for one answer to a prompt, and rollout.environment has several "
            "turns: use sampling"
        )
    if config.rollout.stop:
        yield (
            "rollout.strategy=beam knows no strings that end a response, "
            f"rollout.stop={config.rollout.stop}: use stop_token_ids"
        )
    if config.moe.routing_replay == RoutingReplay.engine:
        yield (
            "moe.routing_replay=engine would send the routing of a whole beam with each of its tokens: with "
            "rollout.strategy=beam use off or old_policy"
        )


@ROLLOUT.rule(
    "Settings of the beam search are those of the strategy.",
    "rollout.strategy",
    "rollout.beam.length_penalty",
    "rollout.beam.early_stopping",
    commands=_TRAIN,
)
def beam_settings_have_their_strategy(config: Config) -> Iterator[str]:
    if config.rollout.strategy != Strategy.beam and config.rollout.beam != BeamConfig():
        yield (
            "rollout.beam means nothing with rollout.strategy=sampling: leave it out, or set "
            "rollout.strategy=beam"
        )
