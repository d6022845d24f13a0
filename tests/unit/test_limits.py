"""Every key by itself: the schema excludes values that make no sense."""

import dataclasses
import math
import re
from types import UnionType
from typing import get_args, get_origin

import pytest

from grpo_megatron.algorithm.kl import FULL_KL, KL_TYPES
from grpo_megatron.algorithm.surrogates import RATIO_LEVELS
from grpo_megatron.batch.token_weights import LOSS_AGG_MODES
from grpo_megatron.capabilities import GPUS
from grpo_megatron.config.command import Command
from grpo_megatron.config.load import known_keys
from grpo_megatron.config.options import limits_of
from grpo_megatron.config.schema import Config
from grpo_megatron.preflight.rules import out_of_limits, violations
from grpo_megatron.rewards.answers import FINDERS


def leaves():
    return {key: field for key, field in known_keys().items() if not dataclasses.is_dataclass(field.type)}


def with_value(key, value) -> Config:
    """Return the default configuration with one value, whatever its type."""
    config = Config()
    config.model.path, config.data.train = "model", "data.jsonl"
    *sections, last = key.split(".")
    place = config
    for name in sections:
        place = getattr(place, name)
    setattr(place, last, value)
    return config


def kinds(field) -> set:
    """Return the plain types that a key can have, including those of a list's items."""
    parts = set(get_args(field.type)) if isinstance(field.type, UnionType) else {field.type}
    return parts | {inner for part in parts if get_origin(part) is list for inner in get_args(part)}


NUMBERS = [key for key, field in leaves().items() if kinds(field) & {int, float} and bool not in kinds(field)]
TEXTS = [key for key, field in leaves().items() if str in kinds(field)]

# Numbers that may be anything finite, and texts that may be anything: each a decision.
UNLIMITED = {
    "algorithm.entropy_coeff",
    "eval.pass_reward",
    "reward.failure_value",
    "rollout.gymnasium.invalid_reward",
}
ANY_TEXT = {"data.system_prompt", "data.prompt_suffix", "reward.code.preamble"}


@pytest.mark.parametrize("key", NUMBERS)
def test_every_number_is_finite_and_has_bounds(key):
    field = leaves()[key]
    for value in (math.inf, -math.inf, math.nan) if float in kinds(field) else (2**63, -(2**63)):
        given = [value] if "list" in str(field.type) else value
        (sentence,) = out_of_limits(with_value(key, given))[key]
        assert re.match(rf"(each of )?{re.escape(key)} must be", sentence)
    assert bool(limits_of(field).of_numbers()) == (key not in UNLIMITED)


@pytest.mark.parametrize("key", TEXTS)
def test_no_text_is_empty_unless_it_may_be(key):
    given = [""] if "list" in str(leaves()[key].type) else ""
    # Without a value, model.path is missing, which is said of it elsewhere.
    assert (key in out_of_limits(with_value(key, given))) == (key not in ANY_TEXT | {"model.path"})


NONSENSE = [
    ("run.name", "", "must be the name of one folder"),
    ("run.name", "../../x", "must be the name of one folder"),
    ("run.name", "..", "must be the name of one folder"),
    ("run.name", "a/b", "must be the name of one folder"),
    ("run.name", "a\0b", "must be the name of one folder"),
    ("run.name", "x" * 256, "must be the name of one folder"),
    ("run.root", " ", "must be a path"),
    ("run.root", "~/runs", "no ~ for the home folder"),
    ("run.root", "a\0b", "must be a path"),
    ("run.seed", -1, "must be at least 0 and at most 2147483647"),
    ("run.seed", 2**31, "must be at least 0 and at most 2147483647"),
    ("run.total_steps", 0, "must be greater than 0"),
    ("run.resume", "", "must be a path"),
    ("data.train_weights", [1.0, 0.0], "each of data.train_weights must be greater than 0"),
    ("rollout.engine.mem_fraction", 1.5, "less than 1"),
    ("rollout.engine.mem_fraction", 0.0, "greater than 0"),
    ("rollout.engine.cpu_threads", "0", "must be auto, or a whole number from 1 to 1024"),
    ("rollout.engine.cpu_threads", "-2", "must be auto, or a whole number from 1 to 1024"),
    ("megatron.cpu_threads", "2.5", "must be auto, or a whole number from 1 to 1024"),
    ("megatron.cpu_threads", "all", "must be auto, or a whole number from 1 to 1024"),
    ("rollout.engine.start_timeout", 0.0, "must be greater than 0"),
    ("rollout.engine.request_timeout", -1.0, "must be greater than 0"),
    ("rollout.engine.request_timeout", 1e300, "at most 10000000"),
    ("rollout.engine.max_total_tokens", -5, "must be greater than 0"),
    ("rollout.engine.max_running_requests", 0, "must be greater than 0"),
    ("rollout.top_p", 1.5, "at most 1"),
    ("rollout.top_k", -2, "must be at least -1"),
    ("rollout.stop", ["\n", ""], "must not be empty"),
    ("rollout.stop_token_ids", [2, -1], "each of rollout.stop_token_ids must not be negative"),
    ("reward.extract", "(", "must be a regular expression"),
    ("reward.workers", 0, "must be greater than 0"),
    ("reward.code.limits.seconds", 1e-6, "must be at least 0.01"),
    ("reward.answer_from", ["whole", "end"], "reward.answer_from=end is unknown; choose one of hashes"),
    ("megatron.tensor_parallel", 0, "must be greater than 0"),
    ("megatron.pipeline_layers", [12, 0], "each of megatron.pipeline_layers must be greater than 0"),
    ("megatron.recompute_modules", ["attn"], "megatron.recompute_modules=attn is unknown"),
    ("megatron.collective_timeout", 0.0, "must be greater than 0"),
    ("optimizer.lr", math.inf, "must be a finite number"),
    ("optimizer.beta1", math.nan, "must be a finite number"),
    ("optimizer.beta1", 1.0, "less than 1"),
    ("optimizer.beta2", -0.1, "at least 0"),
    ("weight_sync.bucket_bytes", -1, "must be greater than 0"),
    ("cluster.gpu", "h100", "cluster.gpu=h100 is unknown; choose one of none"),
    ("eval.top_p", 0.0, "must be greater than 0"),
    ("eval.max_response_length", 0, "must be greater than 0"),
    ("checkpoint.every", -1, "must not be negative"),
    ("algorithm.kl_loss_coef", -0.1, "must not be negative"),
    ("algorithm.early_stop_imp_ratio", 1.0, "must be greater than 1"),
    ("mismatch.ratio_high", 0.0, "must be greater than 0"),
]


@pytest.mark.parametrize(("key", "value", "says"), NONSENSE)
@pytest.mark.parametrize("command", [Command.train, Command.sft])
def test_what_makes_no_sense_is_refused_by_both_commands(key, value, says, command):
    """There is no other message: a rule is not asked about a value that cannot be."""
    (sentence,) = violations(with_value(key, value), command)
    assert key in sentence
    assert says in sentence


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("run.name", "x" * 255),
        ("run.name", "a b.c"),
        ("run.seed", 0),
        ("rollout.stop", ["\n", " "]),
        ("optimizer.beta1", 0.0),
        ("eval.top_p", 1.0),
        ("eval.temperature", 0.0),
        ("algorithm.entropy_coeff", -0.1),
        ("rollout.engine.max_total_tokens", None),
        ("data.prompt_suffix", "\0 "),
    ],
)
def test_what_is_on_the_edge_is_legal(key, value):
    assert violations(with_value(key, value)) == []


def test_the_schemas_choices_are_those_of_the_packages_that_know_them():
    def choices(key):
        return limits_of(known_keys()[key]).choices

    assert choices("algorithm.loss_agg_mode") == LOSS_AGG_MODES
    assert choices("algorithm.kl_loss_type") == (*KL_TYPES, FULL_KL)
    assert choices("algorithm.kl_penalty") == tuple(name for name in KL_TYPES if not name.endswith("+"))
    assert choices("algorithm.ratio_level") == tuple(RATIO_LEVELS)
    assert choices("reward.answer_from") == choices("reward.response_from") == tuple(FINDERS)
    assert choices("cluster.gpu") == ("none", *GPUS)


def test_every_default_is_legal():
    config = Config()
    config.model.path, config.data.train = "model", "data.jsonl"
    assert violations(config, Command.train) == violations(config, Command.sft) == []
