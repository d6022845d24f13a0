"""The section `reward` of the configuration."""

from enum import Enum
from typing import Any, Literal

from grpo_megatron.config.options import (
    LONGEST_WAIT,
    FilledText,
    PathText,
    Pattern,
    dataclass,
    option,
    section,
)
from grpo_megatron.config.sandbox import CodeConfig

# Places where the answer can be in a text. rewards.answers.FINDERS has a finder for each.
ANSWER_PLACES = ("hashes", "boxed", "last_number", "whole")


# Value of reward.function for a reward model. It runs on the trainer's ranks, not in a reward worker.
MODEL = "model"


class OnFailure(str, Enum):
    error = "error"
    value = "value"
    leave_out = "leave_out"


@dataclass
class OverlongBufferConfig:
    length: int = option(
        0,
        "Tokens before rollout.max_response_length over which the punishment grows to penalty "
        "(arXiv:2503.14476 eq. 13).",
        "tokens",
        ge=0,
    )
    penalty: float = option(1.0, "Punishment of a response of full length.", ge=0)


@dataclass
class RewardModelConfig:
    path: PathText | None = option(
        None,
        "HF folder of a *ForSequenceClassification with one label, as `grpo-megatron reward-model` writes "
        "it.",
    )


@dataclass
class RewardConfig:
    function: FilledText = option(
        "exact_match",
        "Reward function: a built-in name (docs/plugins.md) or module:function.",
    )
    args: dict[str, Any] = option({}, "Options of reward.function, such as {pattern: '[0-9]+'} for regex.")
    terms: dict[str, Any] = option(
        {},
        "Terms whose weighted sum replaces reward.function, such as {right: {function: math, weight: 1.0}, "
        "form: {function: format, weight: 0.1}}, with options of the functions.",
    )
    extract: Pattern | None = option(
        None,
        "Pattern of the answer, for exact_match. The last match counts, or its group 1. null: response_from, "
        "or the whole response.",
    )
    answer_from: list[Literal[ANSWER_PLACES]] = option(
        ["whole"],
        "Places of the reference answer, tried in order. hashes: after ####.",
    )
    response_from: list[Literal[ANSWER_PLACES]] = option(
        [],
        "Places of the answer in a response, tried in order. []: those of the reward function.",
    )
    workers: int = option(
        2,
        "Processes per node for rewards, and as many for rollout.environment.",
        gt=0,
        le=1024,
    )
    timeout: float = option(
        30.0,
        "Maximum time of one reward, or of one step of an environment.",
        "seconds",
        ge=0.001,
        le=LONGEST_WAIT,
    )
    on_failure: OnFailure = option(
        OnFailure.error,
        "What happens if a reward or environment fails, hangs or dies. error: the run ends, or restarts "
        "(run.max_restarts) if a process died. value: the sample gets failure_value. leave_out: the group "
        "loses the sample.",
    )
    failure_value: float = option(0.0, "Reward of a failed sample, with on_failure=value.")
    memory_gib: float = option(
        4.0,
        "Memory that a reward process may use, beyond what it has at its start.",
        "GiB",
        ge=0.0625,
        le=10**6,
    )
    file_mib: float = option(
        256.0,
        "Largest file that a reward process may write.",
        "MiB",
        ge=1,
        le=10**9,
    )
    code: CodeConfig = section(
        CodeConfig,
        "Settings of the reward code, which tests programs in responses in a sandbox.",
    )
    model: RewardModelConfig = section(RewardModelConfig, "The reward model of reward.function=model.")
    overlong_buffer: OverlongBufferConfig = section(
        OverlongBufferConfig, "Punishment of responses near the length limit."
    )
    shuffle_control: bool = option(
        False,
        "Shuffle the rewards of a step among its samples, as a control.",
    )


def functions_of(reward: RewardConfig) -> list[str]:
    """Return the names of the reward functions that a run uses.

    These are the functions of the terms in `reward.terms`, or `reward.function` if there are no terms. A term
    that is not a mapping is skipped.
    """
    terms = reward.terms.values()
    return (
        [str(term.get("function")) for term in terms if isinstance(term, dict)]
        if terms
        else [reward.function]
    )
