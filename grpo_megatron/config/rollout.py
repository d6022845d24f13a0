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


class EarlyStopping(str, Enum):
    unlikely = "unlikely"
    complete = "complete"
    never = "never"


@dataclass
class BeamConfig:
    length_penalty: float = option(
        1.0,
        "a sequence of n tokens scores its log-prob divided by n to the power of this",
        ge=-10,
        le=10,
    )
    early_stopping: EarlyStopping = option(
        EarlyStopping.unlikely,
        "with rollout.n finished sequences, a search ends where the best beam that goes on would score less "
        "than the worst of these if it ended now (unlikely; False in transformers), at once (complete; "
        "True), or where no longer sequence can score more (never)",
    )


@dataclass
class DynamicSamplingConfig:
    enabled: bool = option(
        False,
        "sample further prompts in place of the groups that algorithm.filters drop, until "
        "data.train_batch_size are left (DAPO, arXiv:2503.14476 section 3.2)",
    )
    over_sampling: float = option(
        1.0,
        "groups in flight over those that are missing; more fill a batch sooner, and those in flight when it "
        "is full are aborted",
        ge=1,
        le=100,
    )
    max_batches: float = option(
        10.0,
        "most prompts that one step samples, over data.train_batch_size",
        "batches",
        ge=1,
        le=10000,
    )
    shortage: Shortage = option(
        Shortage.error, "where these leave the batch short: error, or train on the smaller one that there is"
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
        "environment as gymnasium.make knows it; module:name imports the module that registers it first",
    )
    args: dict[str, Any] = option({}, "further arguments of gymnasium.make")
    record_args: list[FilledText] = option(
        [], "fields of a record that are arguments of gymnasium.make too, such as a map"
    )
    text: FilledText | None = option(
        None,
        "function (environment, observation) -> text, as module:attribute; null: a text as it is, else what "
        "str() makes of it",
    )
    actions: list[FilledText] = option(
        [], "what the model writes for each action, in their order; none: their numbers"
    )
    action_pattern: Pattern | None = option(
        None,
        "regular expression; its last match (group 1 if any) in a turn is the action; null: the whole turn "
        "without white space around it",
    )
    invalid_action: InvalidAction = option(
        InvalidAction.answer,
        "a turn without an action: answer it, without a step of the environment, or end the episode",
    )
    invalid_reward: float = option(0.0, "reward of a turn without an action")


@dataclass
class RolloutConfig:
    n: int = option(8, "responses sampled per prompt (the group size)", gt=0)
    strategy: Strategy = option(
        Strategy.sampling,
        "how a group comes about: samples of the policy, or the rollout.n sequences that a beam search "
        "finds, which are none",
    )
    # SGLang decodes greedily below 1e-6, and bf16 logits divided by a small temperature lose all precision.
    temperature: float = option(
        1.0, "sampling temperature; applied in training in the same way", ge=0.01, le=100
    )
    top_p: float = option(1.0, "nucleus sampling; only 1.0, see top_k", gt=0, le=1)
    top_k: int = option(
        -1, "top-k sampling; only -1 (off): else the rollout log-prob is of another distribution", ge=-1
    )
    max_response_length: int = option(
        512,
        "longest response; with rollout.environment, of turns and observations together, as the model reads "
        "them",
        "tokens",
        gt=0,
    )
    environment: FilledText | None = option(
        None,
        "environment that answers the model over several turns and rewards it (in place of reward.function): "
        "gymnasium, tools (whose last turn reward.function scores), or module:attribute; null: the model "
        "answers once",
    )
    gymnasium: GymnasiumConfig = section(GymnasiumConfig, "rollout.environment=gymnasium")
    tools: list[FilledText] = option(
        ["calculator"],
        "what the model may call with rollout.environment=tools: calculator, python (in the sandbox of "
        "reward.code), module:attribute",
    )
    history: HistoryKind = option(
        HistoryKind.append,
        "what the model reads in a later turn: append (what it read and wrote before, then the observation), "
        "or template (the chat template applied to all messages, which may drop the thinking of earlier "
        "turns)",
    )
    max_turns: int = option(
        8, "most turns of the model in one episode, with rollout.environment", "turns", gt=0
    )
    stop: list[FilledText] = option([], "strings that end a response (besides the model's end token)")
    stop_token_ids: list[NonNegativeInt] = option(
        [],
        "token ids that end a response, besides the model's end tokens and the one that ends a turn in the "
        "chat template; they stay in the text that rewards see",
    )
    max_concurrency: int = option(256, "samples in flight per engine at a time", gt=0)
    record: PathText | None = option(None, "file to write every step's samples to, for rollout.replay")
    replay: PathText | None = option(None, "file of recorded samples to train on instead of generating")
    dynamic_sampling: DynamicSamplingConfig = section(
        DynamicSamplingConfig, "prompts in place of those without a signal"
    )
    beam: BeamConfig = section(BeamConfig, "beam search, with rollout.strategy=beam")
    engine: EngineConfig = section(EngineConfig, "the SGLang engines")
