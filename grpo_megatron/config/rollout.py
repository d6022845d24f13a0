"""The section `rollout` of the configuration."""

from enum import Enum
from typing import Any

from pydantic import NonNegativeInt

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
        "Exponent of the length in a sequence's score, which is its log-prob divided by (number of tokens) "
        "to the power of this.",
        ge=-10,
        le=10,
    )
    early_stopping: EarlyStopping = option(
        EarlyStopping.unlikely,
        "When a search ends, once it has rollout.n finished sequences. unlikely: when the best unfinished "
        "beam, if it ended now, would score less than the worst finished one (False in transformers). "
        'complete: at once (True). never: when no longer sequence can score more ("never").',
    )


@dataclass
class DynamicSamplingConfig:
    enabled: bool = option(
        False,
        "true: further prompts are sampled in place of the groups that algorithm.filters drop, until "
        "data.train_batch_size groups are left (DAPO, arXiv:2503.14476 section 3.2).",
    )
    over_sampling: float = option(
        1.0,
        "Number of groups in flight divided by the number of groups that the batch still lacks. A larger "
        "value fills the batch sooner. Groups still in flight when the batch is full are aborted.",
        ge=1,
        le=100,
    )
    max_batches: float = option(
        10.0,
        "Maximum number of prompts that one step samples, divided by data.train_batch_size.",
        "batches",
        ge=1,
        le=10000,
    )
    shortage: Shortage = option(
        Shortage.error,
        "What happens if max_batches is reached and the batch is not full. error: the run ends. smaller: "
        "the step trains on what there is.",
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
        "Environment id for gymnasium.make. module:name first imports the module that registers the "
        "environment.",
    )
    args: dict[str, Any] = option({}, "Further arguments of gymnasium.make.")
    record_args: list[FilledText] = option(
        [], "Fields of a record that are passed to gymnasium.make too, such as a map."
    )
    text: FilledText | None = option(
        None,
        "Function (environment, observation) -> text, as module:attribute. null: an observation that is "
        "text is used as it is, any other as str() writes it.",
    )
    actions: list[FilledText] = option(
        [],
        "Words that the model writes for the actions, in the order of the actions. []: the model writes "
        "their numbers.",
    )
    action_pattern: Pattern | None = option(
        None,
        "Regular expression for the action. Its last match in a turn counts, or group 1 of this match if "
        "there is one. null: the action is the whole turn without surrounding white space.",
    )
    invalid_action: InvalidAction = option(
        InvalidAction.answer,
        "What happens after a turn without an action. answer: the model is told so, without a step of the "
        "environment. end: the episode ends.",
    )
    invalid_reward: float = option(0.0, "Reward of a turn without an action.")


@dataclass
class RolloutConfig:
    n: int = option(8, "Number of responses per prompt, the group size.", gt=0)
    strategy: Strategy = option(
        Strategy.sampling,
        "How the responses of a group are found. sampling: they are sampled from the policy. beam: they are "
        "the rollout.n sequences that a beam search finds, which are not samples of the policy.",
    )
    temperature: float = option(
        1.0,
        "Temperature of sampling. Training divides the logits by it too, and needs 0.01 to 100.",
        ge=0,
    )
    top_p: float = option(
        1.0,
        "Probability mass of nucleus sampling. Training needs 1.0, for the reason given at top_k.",
        gt=0,
        le=1,
    )
    top_k: int = option(
        -1,
        "Number of tokens of top-k sampling. Training needs -1 (off), because the engine's log-probs are of "
        "the full distribution.",
        ge=-1,
    )
    max_response_length: int = option(
        512,
        "Length of the longest response. With rollout.environment, all turns and observations count "
        "together, as the model reads them.",
        "tokens",
        gt=0,
    )
    environment: FilledText | None = option(
        None,
        "Environment that answers the model over several turns: gymnasium, tools, or module:attribute. It "
        "gives the reward in place of reward.function; with tools, reward.function scores the last turn. "
        "null: the model answers once.",
    )
    gymnasium: GymnasiumConfig = section(GymnasiumConfig, "Settings of rollout.environment=gymnasium.")
    tools: list[FilledText] = option(
        ["python"],
        "Tools that the model may call with rollout.environment=tools: python (in the sandbox of "
        "reward.code), or module:attribute.",
    )
    history: HistoryKind = option(
        HistoryKind.append,
        "What the model reads in a later turn. append: what it read and wrote before, then the observation. "
        "template: the chat template applied to all messages, which may drop the thinking of earlier turns.",
    )
    max_turns: int = option(
        8, "Maximum number of the model's turns in one episode, with rollout.environment.", "turns", gt=0
    )
    episode_timeout: float | None = option(
        None,
        "Maximum time of one episode, with rollout.environment. A longer one fails, see reward.on_failure. "
        "null: no limit.",
        "seconds",
        gt=0,
    )
    stop: list[FilledText] = option([], "Strings that end a response, besides the model's end token.")
    stop_token_ids: list[NonNegativeInt] = option(
        [],
        "Token ids that end a response, besides the model's end tokens and the token that ends a turn in "
        "the chat template. They stay in the text that rewards see.",
    )
    max_concurrency: int = option(
        256,
        "Maximum number of samples in flight per engine. Fewer are sent while requests wait in the engine, "
        "because its KV cache is full.",
        gt=0,
    )
    staleness: int = option(
        0,
        "Maximum age of samples when a step trains on them, and number of batches that are sampled ahead "
        "while the trainer works. 0: sampling and training alternate. docs/asynchronous.md says what to "
        "choose.",
        "weight versions",
        ge=0,
        le=100,
    )
    order: Order = option(
        Order.fifo,
        "Which finished groups a step trains on. fifo: those that were started first. window: of the "
        "oldest groups, as many as two batches have, those that have finished. ready: those that finish "
        "first, which prefers short responses. No order makes a sample older than rollout.staleness.",
    )
    on_update: OnUpdate = option(
        OnUpdate.wait,
        "What a weight sync does while groups are sampled. wait: it waits until they are done. continue: "
        "their responses continue with the new weights, and the KV cache of their tokens is computed again. "
        "keep: they continue with the new weights and the old KV cache. continue and keep need SGLang 0.5.20 "
        "or later.",
    )
    record: PathText | None = option(
        None,
        "Folder to which the samples of every step are written, for rollout.replay. With engines on several "
        "nodes, it must be on a disk that all nodes share. null: none.",
    )
    replay: PathText | None = option(
        None,
        "Recording to train on, a folder that rollout.record wrote. Ranks on several nodes need it on a disk "
        "that all nodes share. No engine is started. null: samples are generated.",
    )
    dynamic_sampling: DynamicSamplingConfig = section(
        DynamicSamplingConfig, "Sampling of further prompts in place of groups that filters drop."
    )
    beam: BeamConfig = section(BeamConfig, "Settings of rollout.strategy=beam.")
    engine: EngineConfig = section(EngineConfig, "The SGLang engines.")
