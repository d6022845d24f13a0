"""Rules about data, generation and environments."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from grpo_megatron.config.rollout import HistoryKind
from grpo_megatron.config.schema import Config
from grpo_megatron.data.template_choice import NO_TEMPLATE, check_arguments
from grpo_megatron.errors import UserError
from grpo_megatron.preflight.rule import (
    COMMANDS,
    ENGINE_COMMANDS,
    SYNC_COMMANDS,
    RuleBook,
    excludes,
    needs,
    only_with,
    refuses,
    shown,
)
from grpo_megatron.rollout.agent_program import AgentProgram
from grpo_megatron.rollout.agent_task import agent
from grpo_megatron.rollout.environments import offered_tools
from grpo_megatron.rollout.published.server import check_environment

_TRAIN = ("train",)
_AGENT = "rollout.agent.function or rollout.agent.command"
_OF_COMMANDS = ("isolation", "files", "memory_mib", "processes", "files_mib")

# Each check takes a Config.
ROLLOUT = RuleBook(
    refuses(
        "data.train_weights",
        "each record is trained on once per epoch; list a file several times in data.train to use it more "
        "often",
        ("sft", "reward-model"),
    ),
    needs(
        "rollout.dynamic_sampling.enabled=true",
        "algorithm.filters",
        "dynamic sampling replaces the groups that filters such as nonzero_variance remove",
    ),
    excludes("rollout.replay", "data.eval", "a replayed run starts no engine; set data.eval=null"),
    excludes("rollout.replay", "rollout.record", "there is nothing new to record; set rollout.record=null"),
    excludes(
        "rollout.staleness",
        "cluster.placement=colocated or megatron.sleep=true",
        "engines sample while the trainer works, so that both need their memory at the same time; set "
        "cluster.placement=separate and megatron.sleep=false",
    ),
    excludes(
        "rollout.staleness",
        "train.old_logprobs=current or train.old_logprobs=recompute and mismatch.correction=none",
        "the policy ratio would compare the newest weights with themselves, although older weights "
        "generated the samples; set train.old_logprobs=rollout, or a mismatch.correction with "
        "train.old_logprobs=recompute",
    ),
    excludes(
        "rollout.staleness",
        "mismatch.action=mask|stop",
        "the log-probs of older weights are expected to differ from the trainer's; set mismatch.action=warn",
    ),
    excludes(
        "rollout.staleness!=0|1",
        "algorithm.surrogate=reinforce and mismatch.correction=none",
        "an objective without a bound on the policy ratio diverges on samples several versions old; set a "
        "mismatch.correction or algorithm.surrogate=clip",
    ),
    excludes(
        "rollout.staleness",
        "rollout.replay",
        "the samples of a recording are those of the steps that recorded them; set rollout.staleness=0",
    ),
    excludes(
        "rollout.staleness",
        "rollout.dynamic_sampling.over_sampling!=1.0",
        "groups that are sampled ahead already take the place of those that filters drop; set "
        "rollout.dynamic_sampling.over_sampling=1",
    ),
    needs(
        "eval.beside=true",
        "rollout.staleness",
        "without staleness, training waits for its samples, and all engines generate them; set "
        "eval.beside=false",
    ),
    only_with("eval.engines", "eval.beside=true"),
    only_with("rollout.order", "rollout.staleness"),
    only_with("rollout.on_update", "rollout.staleness"),
    excludes(
        _AGENT,
        "rollout.environment",
        "the agent plays the episode, and calls tools itself; remove one of them",
        ENGINE_COMMANDS,
    ),
    excludes(
        _AGENT,
        f"data.chat_template={NO_TEMPLATE}",
        "an agent's requests have chat messages; set data.chat_template=tokenizer or a file",
        ENGINE_COMMANDS,
    ),
    excludes(
        _AGENT,
        "rollout.strategy=beam",
        "beam search finds one response to a prompt, but an agent makes several requests; set "
        "rollout.strategy=sampling",
    ),
    excludes(
        "rollout.agent.function",
        "rollout.agent.command",
        "one agent plays the episodes; remove one of them",
        ENGINE_COMMANDS,
    ),
    only_with(
        tuple(f"rollout.agent.{key}" for key in _OF_COMMANDS),
        "rollout.agent.command",
        commands=ENGINE_COMMANDS,
    ),
    only_with(
        "rollout.agent.address",
        "rollout.agent.function or rollout.agent.command and rollout.agent.isolation=none",
        "an isolated command reaches the endpoint by its own loopback",
        commands=ENGINE_COMMANDS,
    ),
    only_with("rollout.max_turns", f"rollout.environment or {_AGENT}", commands=ENGINE_COMMANDS),
    only_with("rollout.episode_timeout", f"rollout.environment or {_AGENT}", commands=ENGINE_COMMANDS),
    only_with("rollout.tools", "rollout.environment=tools", commands=ENGINE_COMMANDS),
    only_with("rollout.mcp", "rollout.environment=tools", commands=ENGINE_COMMANDS),
    only_with("rollout.gymnasium", "rollout.environment=gymnasium", commands=ENGINE_COMMANDS),
    only_with("rollout.history", "rollout.environment", commands=ENGINE_COMMANDS),
    excludes(
        "rollout.history=template",
        f"data.chat_template={NO_TEMPLATE}",
        "there is no template to render the turns with",
        ENGINE_COMMANDS,
    ),
    excludes(
        "rollout.history=template",
        "data.overlong_prompts=truncate_left",
        "every turn renders the prompt again from its messages, which cannot be cut; set "
        "data.overlong_prompts=skip or data.overlong_prompts=error",
        ENGINE_COMMANDS,
    ),
    excludes(
        "rollout.strategy=beam",
        "rollout.environment",
        "beam search finds one response to a prompt, but an environment has several turns; set "
        "rollout.strategy=sampling",
    ),
    excludes(
        "rollout.strategy=beam",
        "rollout.stop",
        "beam search can stop only at tokens; use rollout.stop_token_ids",
    ),
    excludes(
        "rollout.strategy=beam",
        "moe.routing_replay=engine",
        "the engine would send the routing of a whole beam with each of its tokens; set "
        "moe.routing_replay=off or moe.routing_replay=old_policy",
    ),
    only_with("rollout.beam", "rollout.strategy=beam"),
    refuses("rollout.replay", "a session samples with engines", ("serve",)),
    refuses(
        "algorithm.use_kl_loss=true and algorithm.kl_loss_type=full",
        "a session does not keep the reference's hidden states; choose an estimator, such as k3",
        ("serve",),
    ),
    refuses(
        "moe.routing_replay=engine|old_policy",
        "the training data of a session have no routing; set moe.routing_replay=off",
        ("serve",),
    ),
)


@ROLLOUT.rule("data.train must be a file, hf:NAME, or a list of these.", "data.train")
def training_data_is_named(config: Config) -> Iterator[str]:
    yield from _named("data.train", config.data.train)


@ROLLOUT.rule("data.eval must be a file, hf:NAME, or a list of these.", "data.eval", commands=COMMANDS)
def held_out_data_is_named(config: Config) -> Iterator[str]:
    yield from _named("data.eval", config.data.eval)


@ROLLOUT.rule(
    "data.chat_template_args must not have an argument that the program passes itself, such as tools.",
    "data.chat_template_args",
    commands=COMMANDS,
    whole=True,
)
def template_gets_each_argument_once(config: Config) -> Iterator[str]:
    try:
        check_arguments(config.data.chat_template_args)
    except UserError as error:
        yield str(error)


def _named(key: str, value: Any) -> Iterator[str]:
    names = value if isinstance(value, list) else [value]
    if value is not None and not all(isinstance(name, str) and name.strip() for name in names):
        yield f"{key}={value!r}"


@ROLLOUT.rule(
    "data.train_weights must be empty, or have one number for each source in the list data.train.",
    "data.train_weights",
    "data.train",
)
def weights_match_the_sources(config: Config) -> Iterator[str]:
    weights, sources = config.data.train_weights, config.data.train
    if weights and (not isinstance(sources, list) or len(weights) != len(sources)):
        yield shown(config, "data.train_weights", "data.train")


@ROLLOUT.rule(
    "data.train must be set to the training prompts, unless rollout.replay is set.",
    "data.train",
    "rollout.replay",
    commands=_TRAIN,
)
def there_are_prompts(config: Config) -> Iterator[str]:
    if not config.rollout.replay and not config.data.train:
        yield shown(config, "data.train")


@ROLLOUT.rule(
    "With eval.beside, eval.engines must be less than rollout.engine.num_engines, because the others go on "
    "with training.",
    "eval.beside",
    "eval.engines",
    "rollout.engine.num_engines",
    commands=_TRAIN,
)
def engines_are_left_for_training(config: Config) -> Iterator[str]:
    if config.eval.beside and config.eval.engines >= config.rollout.engine.num_engines:
        yield shown(config, "eval.engines", "rollout.engine.num_engines")


@ROLLOUT.rule(
    "rollout.record must not be the run's own folder, which is named run.name in run.root.",
    "rollout.record",
    "run.root",
    "run.name",
    commands=_TRAIN,
)
def recording_has_its_own_folder(config: Config) -> Iterator[str]:
    run, record = config.run, config.rollout.record
    if record and Path(record).absolute() == Path(run.root, run.name).absolute():
        yield shown(config, "rollout.record")


# Below 1e-6, SGLang would also decode greedily.
@ROLLOUT.rule(
    "rollout.temperature must be at least 0.01 and at most 100: training divides the logits by the "
    "temperature, and bf16 logits divided by a small number lose all precision.",
    "rollout.temperature",
)
def training_can_divide_by_the_temperature(config: Config) -> Iterator[str]:
    if not 0.01 <= config.rollout.temperature <= 100:
        yield shown(config, "rollout.temperature")


@ROLLOUT.rule(
    "rollout.top_p must be 1.0 and rollout.top_k must be -1: samples must come from the full distribution, "
    "for which the log-probs are computed.",
    "rollout.top_p",
    "rollout.top_k",
    commands=SYNC_COMMANDS,
)
def sampling_is_of_the_full_distribution(config: Config) -> Iterator[str]:
    if config.rollout.top_p != 1.0 or config.rollout.top_k != -1:
        yield shown(config, "rollout.top_p", "rollout.top_k")


@ROLLOUT.rule(
    "rollout.agent.function must be registered, or importable as module:attribute.",
    "rollout.agent.function",
    commands=ENGINE_COMMANDS,
    whole=True,
)
def agent_is_known(config: Config) -> Iterator[str]:
    if config.rollout.agent.function is not None:
        yield from agent.problems(config.rollout.agent.function)


@ROLLOUT.rule(
    "rollout.agent.address must name the machine, because agents get it in the endpoint's URL; set it to "
    "node instead of 0.0.0.0 or ::.",
    "rollout.agent.address",
    commands=ENGINE_COMMANDS,
)
def agent_address_names_a_machine(config: Config) -> Iterator[str]:
    if config.rollout.agent.address in ("0.0.0.0", "::"):
        yield shown(config, "rollout.agent.address")


@ROLLOUT.rule(
    "rollout.agent.files must exist and have different names, and this machine must be able to isolate "
    "rollout.agent.command.",
    "rollout.agent.command",
    "rollout.agent.files",
    "rollout.agent.isolation",
    commands=ENGINE_COMMANDS,
    whole=True,
)
def agent_command_can_run(config: Config) -> Iterator[str]:
    if config.rollout.agent.command is not None:
        try:
            AgentProgram(config.rollout.agent)
        except UserError as error:
            yield str(error)


@ROLLOUT.rule(
    "rollout.environment must be built in, registered, or importable as module:attribute, and must find "
    "what it needs.",
    "rollout.environment",
    "rollout.gymnasium.id",
    "rollout.gymnasium.text",
    "rollout.verifiers.python",
    "rollout.verifiers.env",
    "rollout.max_turns",
    "rollout.tools",
    "rollout.mcp",
    "reward.timeout",
    "reward.code.isolation",
    commands=(*ENGINE_COMMANDS, "sft"),
    whole=True,
)
def environment_is_known(config: Config) -> Iterator[str]:
    try:
        offered_tools(config.rollout, config.reward)
        if config.rollout.task_set is not None:
            check_environment(config.rollout)
    except UserError as error:
        yield str(error)


@ROLLOUT.rule(
    "rollout.verifiers has an effect only with rollout.environment=verifiers:ID.",
    "rollout.environment",
    "rollout.verifiers.python",
    "rollout.verifiers.env",
    commands=ENGINE_COMMANDS,
)
def verifiers_is_used(config: Config) -> Iterator[str]:
    own = config.rollout.verifiers
    if config.rollout.task_set is None and (own.python or own.env):
        yield shown(config, "rollout.verifiers.python", "rollout.verifiers.env")


@ROLLOUT.rule(
    "rollout.environment=verifiers:ID needs rollout.history=append and a data.chat_template: its agents "
    "send chat messages, and decide themselves what the model reads.",
    "rollout.environment",
    "rollout.history",
    "data.chat_template",
    commands=ENGINE_COMMANDS,
)
def agents_of_verifiers_send_messages(config: Config) -> Iterator[str]:
    is_plain = config.data.chat_template == NO_TEMPLATE
    if config.rollout.task_set is not None and (config.rollout.history != HistoryKind.append or is_plain):
        yield shown(config, "rollout.history", "data.chat_template")
