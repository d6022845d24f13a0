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
        "soft overlong punishment (DAPO, arXiv:2503.14476 eq. 13) in the last this many tokens before "
        "rollout.max_response_length; 0: none",
        "tokens",
        ge=0,
    )
    penalty: float = option(1.0, "what the reward of a response of full length loses", ge=0)


@dataclass
class RewardModelConfig:
    path: PathText | None = option(
        None,
        "for the function model: HF folder of a reward model (*ForSequenceClassification with one label), "
        "such as `grpo-megatron reward-model` writes; it scores on the trainer's ranks, between generation "
        "and training, with their parallel sizes",
    )


@dataclass
class RewardConfig:
    function: FilledText = option(
        "exact_match",
        "name of a built-in function, model (a reward model, see reward.model), or module:function",
    )
    args: dict[str, Any] = option({}, "options of reward.function, such as {pattern: '[0-9]+'} of regex")
    terms: dict[str, Any] = option(
        {},
        "in place of reward.function: a sum of terms, such as {right: {function: math, weight: 1.0}, form: "
        "{function: format, weight: 0.1}}, each with its function's options; the value of a term is the "
        "component of its name",
    )
    extract: Pattern | None = option(
        None,
        "for exact_match: regular expression; its last match (group 1 if any) is the answer",
    )
    answer_from: list[Literal[ANSWER_PLACES]] = option(
        ["whole"],
        "where the reference answer is in its field: whole, hashes (####), boxed, last_number",
    )
    response_from: list[Literal[ANSWER_PLACES]] = option(
        [],
        "where the answer is in a response, tried in order: hashes, boxed, last_number, whole; none: the "
        "reward's own search",
    )
    workers: int = option(
        2,
        "processes on each node that compute rewards, or hold the environments of rollout.environment",
        gt=0,
        le=1024,
    )
    timeout: float = option(
        30.0,
        "longest time for one reward, or for one step of an environment",
        "seconds",
        ge=0.001,
        le=LONGEST_WAIT,
    )
    on_failure: OnFailure = option(
        OnFailure.error,
        "where a reward or an environment fails, hangs, or takes its process down: error ends the run, value "
        "gives that one sample failure_value, leave_out takes it out of its group",
    )
    failure_value: float = option(0.0, "the reward of a sample whose reward failed, with on_failure=value")
    memory_gib: float = option(
        4.0,
        "what a process that computes rewards may occupy beyond what it has when it starts",
        "GiB",
        ge=0.0625,
        le=10**6,
    )
    file_mib: float = option(
        256.0,
        "largest file that a process which computes rewards may write",
        "MiB",
        ge=1,
        le=10**9,
    )
    code: CodeConfig = section(
        CodeConfig, "the reward code: programs in responses, run against tests in a sandbox"
    )
    model: RewardModelConfig = section(RewardModelConfig, "the reward model of the function model")
    overlong_buffer: OverlongBufferConfig = section(
        OverlongBufferConfig, "punishment of responses near the length limit"
    )
    shuffle_control: bool = option(
        False, "control experiment: hand rewards out at random among the step's samples"
    )


def functions_of(reward: RewardConfig) -> list[str]:
    """Return the names of the reward functions that a run uses.

    They are the functions of the terms in `reward.terms`, or `reward.function` if there are no terms. A term
    that is not a mapping is skipped.
    """
    terms = reward.terms.values()
    return (
        [str(term.get("function")) for term in terms if isinstance(term, dict)]
        if terms
        else [reward.function]
    )
