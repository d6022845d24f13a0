"""Every key by itself: the schema excludes values that make no sense."""

import math
import re

import pytest

from grpo_megatron.algorithm.kl import FULL_KL, KL_TYPES
from grpo_megatron.algorithm.surrogates import RATIO_LEVELS
from grpo_megatron.batch.sequence_weights import LOSS_AGG_MODES
from grpo_megatron.capabilities import GPUS
from grpo_megatron.config.command import Command
from grpo_megatron.config.keys import is_section, known_keys, type_name
from grpo_megatron.config.load import Layer, merge
from grpo_megatron.preflight.docs import type_with_limits
from grpo_megatron.preflight.keys import choices
from grpo_megatron.preflight.rules import violations
from grpo_megatron.rewards.answers import FINDERS

NEEDED = Layer("file", {"model": {"path": "model"}, "data": {"train": "data.jsonl"}})


def problems(key, value, command=Command.train) -> list[str]:
    """Return what is wrong with a configuration that sets one key, beside those that every run needs."""
    for name in reversed(key.split(".")):
        value = {name: value}
    settings = merge([NEEDED, Layer("file", value)])
    refused = frozenset(settings.refused)
    return [*settings.refused.values(), *violations(settings.config, command, refused=refused)]


TYPES = {key: type_name(field) for key, field in known_keys().items() if not is_section(field)}
NUMBERS = [key for key, kind in TYPES.items() if re.search(r"\b(number|integer)\b", kind)]
TEXTS = [key for key, kind in TYPES.items() if re.match("(list of )?(text|one of)(?!, list)", kind)]

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
    for value in (math.inf, -math.inf, math.nan):
        (sentence,) = problems(key, [value] if TYPES[key].startswith("list") else value)
        assert re.match(rf"file: (each of )?{re.escape(key)}( must be|: expected)", sentence)
    assert bool(re.search(r"[<>]|\d to ", type_with_limits(key))) == (key not in UNLIMITED)


@pytest.mark.parametrize("key", TEXTS)
def test_no_text_is_empty_unless_it_may_be(key):
    found = problems(key, [""] if TYPES[key].startswith("list") else "")
    assert (found == []) == (key in ANY_TEXT)


NONSENSE = [
    ("run.name", "", "must be a folder name"),
    ("run.name", "../../x", "must be a folder name"),
    ("run.name", "..", "must be a folder name"),
    ("run.name", "a/b", "must be a folder name"),
    ("run.name", "x" * 201, "must be a folder name without a slash, of at most 200 bytes"),
    ("run.root", " ", "must be a path"),
    ("run.root", "~/runs", "without ~ for the home folder"),
    ("run.seed", -1, "must be at least 0"),
    ("run.seed", 2**31, "must be at most 2147483647"),
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
    ("rollout.stop_token_ids", [2, -1], "each of rollout.stop_token_ids must be at least 0"),
    ("reward.extract", "(", "must be a regular expression"),
    ("reward.workers", 0, "must be greater than 0"),
    ("reward.code.limits.seconds", 1e-6, "must be at least 0.01"),
    (
        "reward.answer_from",
        ["whole", "end"],
        "expected list of one of hashes, boxed, last_number, whole, got end",
    ),
    ("megatron.tensor_parallel", 0, "must be greater than 0"),
    ("megatron.pipeline_layers", [12, 0], "each of megatron.pipeline_layers must be greater than 0"),
    ("megatron.recompute_modules", ["attn"], "megatron.recompute_modules: expected list of one of core_attn"),
    ("megatron.collective_timeout", 0.0, "must be greater than 0"),
    ("optimizer.lr", math.inf, "must be a finite number"),
    ("optimizer.beta1", math.nan, "must be a finite number"),
    ("optimizer.beta1", 1.0, "less than 1"),
    ("optimizer.beta2", -0.1, "at least 0"),
    ("weight_sync.bucket_bytes", -1, "must be greater than 0"),
    ("cluster.gpu", "h100", "cluster.gpu: expected one of none, a100-40g"),
    ("eval.top_p", 0.0, "must be greater than 0"),
    ("eval.max_response_length", 0, "must be greater than 0"),
    ("checkpoint.every", -1, "must be at least 0"),
    ("algorithm.kl_loss_coef", -0.1, "must be at least 0"),
    ("algorithm.early_stop_imp_ratio", 1.0, "must be greater than 1"),
    ("mismatch.ratio_high", 0.0, "must be greater than 0"),
]


@pytest.mark.parametrize(("key", "value", "says"), NONSENSE)
@pytest.mark.parametrize("command", [Command.train, Command.sft])
def test_what_makes_no_sense_is_refused_by_both_commands(key, value, says, command):
    """There is no other message: a rule is not asked about a value that cannot be."""
    (sentence,) = problems(key, value, command)
    assert key in sentence
    assert says in sentence


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("run.name", "x" * 200),
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
    assert problems(key, value) == []


def test_the_schemas_choices_are_those_of_the_packages_that_know_them():
    assert choices("algorithm.loss_agg_mode") == list(LOSS_AGG_MODES)
    assert choices("algorithm.kl_loss_type") == [*KL_TYPES, FULL_KL]
    assert choices("algorithm.kl_penalty") == [name for name in KL_TYPES if not name.endswith("+")]
    assert choices("algorithm.ratio_level") == list(RATIO_LEVELS)
    assert choices("reward.answer_from") == choices("reward.response_from") == list(FINDERS)
    assert choices("cluster.gpu") == ["none", *GPUS]


def test_every_default_is_legal():
    assert problems("data.eval", None) == problems("data.eval", None, Command.sft) == []
