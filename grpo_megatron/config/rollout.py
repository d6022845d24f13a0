"""The section `rollout` of the configuration."""

from enum import Enum
from typing import Any

from pydantic import NonNegativeInt

from grpo_megatron.config.agent import AgentConfig
from grpo_megatron.config.engine import EngineConfig
from grpo_megatron.config.options import FilledText, PathText, Pattern, dataclass, option, section


class Shortage(str, Enum):
    error = "error"
    smaller = "smaller"


class Strategy(str, Enum):
    sampling = "sampling"
    beam = "beam"


class Order(str, Enum):
    fifo = "fifo"
    window = "window"
    ready = "ready"


class OnUpdate(str, Enum):
    wait = "wait"
    go_on = "continue"
    keep = "keep"


class EarlyStopping(str, Enum):
    unlikely = "unlikely"
    complete = "complete"
    never = "never"


@dataclass
class BeamConfig:
    length_penalty: float = option(
        1.0,
        "Exponent p in a sequence's score, log-prob / (number of tokens)^p.",
        ge=-10,
        le=10,
    )
    early_stopping: EarlyStopping = option(
        EarlyStopping.unlikely,
        "When a search with rollout.n finished sequences ends. unlikely: if the best unfinished beam, ended "
        "now, would score less than the worst finished one (transformers: False). complete: at once (True). "
        'never: if no longer sequence can score more ("never").',
    )


@dataclass
class DynamicSamplingConfig:
    enabled: bool = option(
        False,
        "Sample further prompts until algorithm.filters leave data.train_batch_size groups "
        "(arXiv:2503.14476 section 3.2).",
    )
    over_sampling: float = option(
        1.0,
        "Groups in flight, divided by those that the batch lacks. Larger values fill it sooner.",
        ge=1,
        le=100,
    )
    max_batches: float = option(
        10.0,
        "Maximum number of prompts that a step samples, divided by data.train_batch_size.",
        "batches",
        ge=1,
        le=10000,
    )
    shortage: Shortage = option(
        Shortage.error,
        "What happens if max_batches does not fill the batch. error: the run ends. smaller: the step trains "
        "on what there is.",
    )


class HistoryKind(str, Enum):
    append = "append"
    template = "template"


class InvalidAction(str, Enum):
    answer = "answer"
    end = "end"


@dataclass
class GymnasiumConfig:
    id: FilledText = option(
        "FrozenLake-v1",
        "Environment id for gymnasium.make. module:name imports the module first.",
    )
    args: dict[str, Any] = option({}, "Further arguments of gymnasium.make.")
    record_args: list[FilledText] = option([], "Fields of a record as further arguments, such as a map.")
    text: FilledText | None = option(
        None,
        "Function (environment, observation) -> text, as module:attribute. null: str() of the observation.",
    )
    actions: list[FilledText] = option(
        [],
        "Words for the actions, in order. []: their numbers.",
    )
    action_pattern: Pattern | None = option(
        None,
        "Pattern of the action. The last match in a turn counts, or its group 1. null: the whole turn.",
    )
    invalid_action: InvalidAction = option(
        InvalidAction.answer,
        "What happens after a turn without an action. answer: the model is told so. end: the episode ends.",
    )
    invalid_reward: float = option(0.0, "Reward of a turn without an action.")


@dataclass
class VerifiersConfig:
    python: PathText | None = option(
        None,
        "Python of the environment that has verifiers. null: .venv-verifiers/bin/python, beside the "
        "environment of this program.",
    )
    env: dict[str, Any] = option(
        {},
        "verifiers' section `env`: task set, agents with harness and runtime. The task set's id comes from "
        "rollout.environment.",
    )


@dataclass
class RolloutConfig:
    n: int = option(8, "Responses per prompt, the group size.", gt=0)
    strategy: Strategy = option(
        Strategy.sampling,
        "Source of a group's responses. sampling: the policy. beam: a beam search, which does not sample the "
        "policy.",
    )
    temperature: float = option(
        1.0,
        "Sampling temperature. Training divides the logits by it too, and needs 0.01 to 100.",
        ge=0,
    )
    top_p: float = option(
        1.0,
        "Probability mass of nucleus sampling. Training needs 1.0.",
        gt=0,
        le=1,
    )
    top_k: int = option(
        -1,
        "Tokens of top-k sampling. Training needs -1 (off).",
        ge=-1,
    )
    max_response_length: int = option(
        512,
        "Maximum length of a response; with rollout.environment, of all turns and observations together.",
        "tokens",
        gt=0,
    )
    environment: FilledText | None = option(
        None,
        "Environment for several turns: gymnasium, tools, verifiers:ID, or module:attribute. It replaces "
        "reward.function; with tools, reward.function scores the last turn.",
    )
    agent: AgentConfig = section(
        AgentConfig, "Your own agent, which plays the episodes: a function or a command.", short="function"
    )
    gymnasium: GymnasiumConfig = section(GymnasiumConfig, "Settings of rollout.environment=gymnasium.")
    verifiers: VerifiersConfig = section(VerifiersConfig, "Settings of rollout.environment=verifiers:ID.")
    tools: list[FilledText] = option(
        ["python"],
        "Tools of rollout.environment=tools: python (in the sandbox of reward.code), module:attribute, or "
        "mcp:SERVER, where SERVER is a name in rollout.mcp, a URL or a command.",
    )
    mcp: dict[str, Any] = option(
        {},
        "MCP servers by name, such as {search: {command: [uvx, my-server], env: {A: b}}}. See "
        "docs/environments.md.",
    )
    history: HistoryKind = option(
        HistoryKind.append,
        "What the model reads in later turns. append: all earlier tokens, then the observation. template: "
        "all messages through the chat template, which may drop earlier thinking.",
    )
    max_turns: int = option(8, "Maximum number of turns in an episode.", "turns", gt=0)
    episode_timeout: float | None = option(
        None,
        "Maximum time of an episode. Then it fails, see reward.on_failure.",
        "seconds",
        gt=0,
    )
    stop: list[FilledText] = option([], "Strings that end a response, besides the model's end token.")
    stop_token_ids: list[NonNegativeInt] = option(
        [],
        "Further token ids that end a response. They stay in the text that rewards see.",
    )
    max_concurrency: int = option(
        256,
        "Maximum number of samples in flight per engine. Fewer are sent while its KV cache is full.",
        gt=0,
    )
    staleness: int = option(
        0,
        "Maximum age of samples in training, and number of batches sampled ahead (docs/asynchronous.md). 0: "
        "sampling and training alternate.",
        "weight versions",
        ge=0,
        le=100,
    )
    order: Order = option(
        Order.fifo,
        "Groups that a step takes. fifo: the oldest. window: finished ones among the oldest two batches. "
        "ready: the first that finish, which prefers short responses.",
    )
    on_update: OnUpdate = option(
        OnUpdate.wait,
        "What a weight sync does to responses in flight. wait: it waits for them. continue: they go on with "
        "a recomputed KV cache. keep: with the old one. continue and keep need SGLang 0.5.20 or later.",
    )
    record: PathText | None = option(
        None,
        "Shared folder to write all samples to, for rollout.replay.",
    )
    replay: PathText | None = option(
        None,
        "Folder of rollout.record to train on, without engines.",
    )
    dynamic_sampling: DynamicSamplingConfig = section(
        DynamicSamplingConfig, "Sampling of further prompts in place of groups that filters drop."
    )
    beam: BeamConfig = section(BeamConfig, "Settings of rollout.strategy=beam.")
    engine: EngineConfig = section(EngineConfig, "The SGLang engines.")

    @property
    def task_set(self) -> str | None:
        """Id of the task set of verifiers that rollout.environment names; None if it names none."""
        kind, separator, id = (self.environment or "").partition(":")
        return id if kind == "verifiers" and separator else None
