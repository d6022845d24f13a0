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
        "Number of tokens before rollout.max_response_length in which the soft overlong punishment grows "
        "from 0 to penalty (DAPO, arXiv:2503.14476 eq. 13). 0: there is no punishment.",
        "tokens",
        ge=0,
    )
    penalty: float = option(
        1.0, "Punishment of a response of full length, which is subtracted from its reward.", ge=0
    )


@dataclass
class RewardModelConfig:
    path: PathText | None = option(
        None,
        "HF folder of the reward model for reward.function=model: a *ForSequenceClassification with one "
        "label, as `grpo-megatron reward-model` writes it. It runs on the trainer's ranks, with their "
        "parallel sizes, between generation and training. null: there is none.",
    )


@dataclass
class RewardConfig:
    function: FilledText = option(
        "exact_match",
        "Reward function: a built-in name, model (see reward.model), or module:function.",
    )
    args: dict[str, Any] = option({}, "Options of reward.function, such as {pattern: '[0-9]+'} for regex.")
    terms: dict[str, Any] = option(
        {},
        "Terms whose weighted sum is the reward, in place of reward.function. An example is {right: "
        "{function: math, weight: 1.0}, form: {function: format, weight: 0.1}}. Each term has the options "
        "of its function too. Its value is logged as reward/component/NAME.",
    )
    extract: Pattern | None = option(
        None,
        "Regular expression for the answer in a response, for exact_match. Its last match counts, or group "
        "1 of this match if there is one. null: the answer is found by response_from, or is the whole "
        "response.",
    )
    answer_from: list[Literal[ANSWER_PLACES]] = option(
        ["whole"],
        "Places of the reference answer in its field, tried in order: whole, hashes (after ####), boxed, "
        "last_number.",
    )
    response_from: list[Literal[ANSWER_PLACES]] = option(
        [],
        "Places of the answer in a response, tried in order: hashes, boxed, last_number, whole. []: the "
        "reward function searches in its own way.",
    )
    workers: int = option(
        2,
        "Number of processes on each node that compute rewards, or hold the environments of "
        "rollout.environment.",
        gt=0,
        le=1024,
    )
    timeout: float = option(
        30.0,
        "Maximum time for one reward, or for one step of an environment.",
        "seconds",
        ge=0.001,
        le=LONGEST_WAIT,
    )
    on_failure: OnFailure = option(
        OnFailure.error,
        "What happens if a reward or an environment fails, hangs, or ends its process. error: the run ends, "
        "or starts again (run.max_restarts) if a process died. value: the sample gets failure_value. "
        "leave_out: the sample is taken out of its group.",
    )
    failure_value: float = option(0.0, "Reward of a sample whose reward failed, with on_failure=value.")
    memory_gib: float = option(
        4.0,
        "Memory that a process which computes rewards may use, beyond what it has when it starts.",
        "GiB",
        ge=0.0625,
        le=10**6,
    )
    file_mib: float = option(
        256.0,
        "Size of the largest file that a process which computes rewards may write.",
        "MiB",
        ge=1,
        le=10**9,
    )
    code: CodeConfig = section(
        CodeConfig,
        "Settings of the reward code, which runs programs in responses against tests in a sandbox.",
    )
    model: RewardModelConfig = section(RewardModelConfig, "The reward model, for the reward function model.")
    overlong_buffer: OverlongBufferConfig = section(
        OverlongBufferConfig, "Punishment of responses near the length limit."
    )
    shuffle_control: bool = option(
        False,
        "true: a control experiment in which the rewards of a step are shuffled among its samples.",
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
