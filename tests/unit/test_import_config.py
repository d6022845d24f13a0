"""Configurations of verl, what the mappings of all systems have in common, and tools/import_config.py.

test_import_rlinf.py tests the values of RLinf's files.
"""

from functools import partial
from pathlib import Path

import pytest
import yaml

from grpo_megatron.config.keys import is_section, known_keys
from grpo_megatron.importers import RLINF, SYSTEMS, VERL, import_settings, read_settings, to_yaml
from grpo_megatron.importers.mapping import UNSET
from grpo_megatron.preflight.check import load_config
from tests.tools import run_tool
from tests.unit.imported_configs import (
    DATA,
    RLINF_FILE,
    VERL_SCRIPT,
    imported,
    left,
    line_about,
    loaded,
    verl,
)

# Keys that every GRPO run of theirs has.
ASKED = {
    "verl": [
        "actor_rollout_ref.rollout.n",
        "data.train_batch_size",
        *(
            f"actor_rollout_ref.actor.{name}"
            for name in (
                "ppo_mini_batch_size",
                "ppo_epochs",
                "clip_ratio",
                "clip_ratio_low",
                "clip_ratio_high",
                "clip_ratio_c",
                "loss_agg_mode",
                "use_kl_loss",
                "kl_loss_coef",
                "kl_loss_type",
                "entropy_coeff",
            )
        ),
        "algorithm.adv_estimator",
        "algorithm.norm_adv_by_std_in_grpo",
        "algorithm.use_kl_in_reward",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu",
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu",
        "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu",
    ],
    "rlinf": [
        f"algorithm.{name}"
        for name in (
            "adv_type",
            "loss_type",
            "loss_agg_func",
            "group_size",
            "kl_beta",
            "kl_penalty_type",
            "ratio_clip_eps",
            "calculate_entropy",
            "entropy_bonus",
            "normalize_advantages",
            "early_stop_imp_ratio",
            "use_valid_token_scale",
        )
    ],
}


# a verl launch command


def test_a_verl_launch_command_gives_our_values(tmp_path):
    config = loaded(imported(VERL, VERL_SCRIPT), tmp_path)
    assert config.run.name == "qwen2.5-7b-dapo-clip"
    assert config.data.train == ["/data/gsm8k/train.parquet", "/data/math/train.parquet"]
    assert config.data.eval == "/data/gsm8k/test.parquet"
    assert (
        config.data.train_batch_size,
        config.data.max_prompt_length,
        config.rollout.max_response_length,
    ) == (
        512,
        2048,
        6144,
    )
    assert config.data.overlong_prompts.name == "skip"
    assert (config.rollout.n, config.train.ppo_mini_batch_size, config.train.ppo_epochs) == (16, 128, 2)
    assert config.train.max_tokens_per_micro_batch == 16384
    algorithm = config.algorithm
    assert (algorithm.adv_estimator, algorithm.norm_adv_by_std_in_grpo) == ("grpo", False)
    assert (algorithm.clip_ratio_low, algorithm.clip_ratio_high, algorithm.clip_ratio_c) == (0.2, 0.28, 10.0)
    assert (algorithm.use_kl_loss, algorithm.kl_loss_coef, algorithm.kl_loss_type) == (
        True,
        0.002,
        "low_var_kl+",
    )
    assert (algorithm.loss_agg_mode, algorithm.entropy_coeff) == ("seq-mean-token-sum-norm", 0.001)
    megatron = config.megatron
    # 2 nodes of 8 GPUs: TP 2, PP 2, so DP 4; engines of 4
    assert (megatron.tensor_parallel, megatron.pipeline_parallel, megatron.data_parallel) == (2, 2, 4)
    assert megatron.recompute.name == "full"
    assert (config.rollout.engine.num_engines, config.rollout.engine.tensor_parallel) == (4, 4)
    assert (config.cluster.placement.name, config.rollout.engine.mem_fraction) == ("colocated", 0.6)
    assert (config.reward.overlong_buffer.length, config.reward.overlong_buffer.penalty) == (1024, 0.5)
    assert (config.checkpoint.every, config.eval.every) == (20, 0)
    assert (config.optimizer.lr, config.optimizer.weight_decay) == (1e-6, 0.1)


def test_verls_defaults_come_along_where_ours_are_others(tmp_path):
    result = verl()
    config = loaded(result, tmp_path)
    assert (config.data.train_batch_size, config.train.ppo_mini_batch_size) == (1024, 256)
    assert (config.optimizer.weight_decay, config.optimizer.beta2) == (0.01, 0.999)
    assert config.algorithm.clip_ratio_c == 3.0
    assert (config.rollout.engine.tensor_parallel, config.megatron.data_parallel) == (2, 8)
    assert result.origins["optimizer.beta2"] == "verl's default of actor_rollout_ref.actor.optim.betas"


def test_what_a_verl_command_has_beyond_ours_is_said():
    result = imported(VERL, VERL_SCRIPT)
    assert result.unknown == ["my_plugin.strength=3"]
    assert "not known here" in line_about(left(result), "trainer.total_epochs")
    assert "not known here" in line_about(left(result), "trainer.total_training_steps")
    assert "module:function" in line_about(left(result), "custom_reward_function.path")
    assert "one partition" in line_about(
        left(result), "actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu"
    )
    for key in ("trainer.my_own_flag", "trainer.logger"):
        line_about(left(result), key)
    assert result.notes == ["$@: further arguments of the script's caller"]
    assert result.values["data.chat_template_args"] == {"enable_thinking": False}
    # a variable in a path is kept, and said
    assert result.values["model.path"] == "$MODEL_PATH"
    assert "replace the variable" in line_about(result.changed, "model.path")
    assert "nodes -> data-parallel replicas" in line_about(result.changed, "trainer.nnodes")


def test_a_setting_in_whose_place_another_is_given_is_reported():
    """It used to be in no part of the report."""
    result = import_settings(VERL, read_settings(VERL_SCRIPT), {"data.train_batch_size": 3})
    line = line_about(result.absorbed, "data.train_batch_size")
    assert line.endswith("data.train_batch_size is given by hand")
    assert result.values["data.train_batch_size"] == 3


@pytest.mark.parametrize(("system", "text"), [(VERL, VERL_SCRIPT), (RLINF, RLINF_FILE)])
def test_nothing_is_dropped_silently(system, text):
    settings = read_settings(text)
    result = import_settings(system, settings)
    told = [*result.origins.values(), *result.changed, *left(result), *result.absorbed, *result.unknown]
    assert len(settings.values) > 40
    assert [
        key
        for key, value in settings.values.items()
        if not any(line.startswith(f"{key}={value}") for line in told)
    ] == []
    assert [
        line
        for line in told
        if line.split(" ")[0].split(":")[0] not in result.report() and line not in to_yaml(result)
    ] == []


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (
            "actor_rollout_ref.actor.clip_ratio=0.1",
            {"algorithm.clip_ratio_low": 0.1, "algorithm.clip_ratio_high": 0.1},
        ),
        (
            "actor_rollout_ref.actor.clip_ratio_high=0.3 actor_rollout_ref.actor.clip_ratio=0.1",
            {"algorithm.clip_ratio_low": 0.1, "algorithm.clip_ratio_high": 0.3},
        ),
        (
            "actor_rollout_ref.actor.policy_loss.loss_mode=gspo",
            {"algorithm.ratio_level": "sequence", "algorithm.surrogate": "clip"},
        ),
        ("algorithm.adv_estimator=rloo", {"algorithm.adv_estimator": "rloo"}),
        ("actor_rollout_ref.rollout.load_format=dummy_megatron", {"rollout.engine.load_format": "dummy"}),
        (
            "algorithm.use_kl_in_reward=True algorithm.kl_ctrl.type=adaptive",
            {"algorithm.use_kl_in_reward": True},
        ),
        (
            "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4",
            {"train.max_tokens_per_micro_batch": 4 * 1024},
        ),
        (
            "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=512 "
            "actor_rollout_ref.actor.use_dynamic_bsz=True",
            {"train.max_tokens_per_micro_batch": 1024},
        ),
        (
            "trainer.total_training_steps=200 actor_rollout_ref.actor.optim.lr_warmup_steps_ratio=0.1",
            {"optimizer.lr_warmup_steps": 20},
        ),
        ("actor_rollout_ref.actor.optim.lr=3e-7", {"optimizer.lr": 3e-7}),
        ("data.truncation=left", {"data.overlong_prompts": "truncate_left"}),
        (
            "reward_model.overlong_buffer.enable=False reward_model.overlong_buffer.len=128",
            {"reward.overlong_buffer.length": 0},
        ),
        (
            "algorithm.rollout_correction.rollout_is=token "
            "algorithm.rollout_correction.rollout_is_threshold=5",
            {"mismatch.correction": "tis", "mismatch.ratio_high": 5},
        ),
        ("algorithm.rollout_correction.bypass_mode=true", {"train.old_logprobs": "rollout"}),
        ("data.train_files=\"['a b.parquet','c.parquet']\"", {"data.train": ["a b.parquet", "c.parquet"]}),
        (
            "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=1",
            {"megatron.tensor_parallel": 1, "megatron.sequence_parallel": None},
        ),
    ],
)
def test_verl_values(arguments, expected, tmp_path):
    result = verl(arguments)
    for key, value in expected.items():
        assert result.values.get(key) == value, key
    loaded(result, tmp_path)


@pytest.mark.parametrize(
    ("arguments", "key", "reason"),
    [
        ("algorithm.adv_estimator=gae", "algorithm.adv_estimator", "no critic"),
        (
            "actor_rollout_ref.actor.policy_loss.loss_mode=clip_cov",
            "actor_rollout_ref.actor.policy_loss.loss_mode",
            "no such policy",
        ),
        ("data.truncation=middle", "data.truncation", "from the left"),
        ("actor_rollout_ref.actor.shuffle=True", "actor_rollout_ref.actor.shuffle", "order"),
        ("actor_rollout_ref.rollout.name=vllm", "actor_rollout_ref.rollout.name", "SGLang"),
        ("algorithm.gamma=0.9 algorithm.adv_estimator=reinforce_plus_plus", "algorithm.gamma", "discounted"),
        (
            "actor_rollout_ref.actor.optim.lr_warmup_steps_ratio=0.1",
            "actor_rollout_ref.actor.optim.lr_warmup_steps_ratio",
            "steps",
        ),
        (
            "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=9999",
            "actor_rollout_ref.actor.ppo_max_token_len_per_gpu",
            "use_dynamic_bsz",
        ),
        ("trainer.n_gpus_per_node=3", "trainer.n_gpus_per_node", "not a multiple"),
        ("data.train_batch_size=$BATCH", "data.train_batch_size", "not known here"),
        ("actor_rollout_ref.rollout.n=$N", "actor_rollout_ref.rollout.n", "not known here"),
        ("trainer.resume_from_path=/ckpt", "trainer.resume_from_path", "cannot be resumed here"),
        ("algorithm.use_kl_in_reward=maybe", "algorithm.use_kl_in_reward", "neither true nor false"),
    ],
)
def test_what_verl_has_and_we_do_not_is_refused_with_the_reason(arguments, key, reason):
    assert reason in line_about(left(verl(arguments)), key)


# the mapping and the documentation


@pytest.mark.parametrize("name", SYSTEMS)
def test_the_mapping_names_keys_that_exist_and_has_those_asked_for(name):
    system = SYSTEMS[name]
    leaves = {key for key, field in known_keys().items() if not is_section(field)}
    for entry in system.entries:
        assert set(entry.ours) <= leaves, entry.theirs
        assert entry.ours or entry.note, f"{entry.theirs} goes nowhere and does not say why"
        assert not (entry.is_pattern and entry.default is not UNSET), entry.theirs
        assert not (entry.is_pattern and entry.ours) or entry.convert, (
            f"{entry.theirs}: several keys cannot be one value"
        )
    names = [entry.theirs for entry in system.entries]
    assert len(names) == len(set(names))
    assert [key for key in ASKED[name] if system.entry_for(key) is None] == []


@pytest.mark.parametrize("name", SYSTEMS)
def test_the_documentation_holds_the_mapping(name):
    page = Path(f"docs/coming-from-{name}.md").read_text(encoding="utf-8")
    assert SYSTEMS[name].table() in page, (
        f"put the output of `python tools/import_config.py --table {name}` into the page"
    )


# the tool


tool = partial(run_tool, "import_config")


@pytest.mark.parametrize("source", ["verl_grpo.sh", "rlinf_grpo.yaml"])
def test_the_tool_writes_a_file_that_passes_the_check(source, tmp_path):
    out = tmp_path / "ours.yaml"
    _, report = tool(DATA / source, "--accept", "--out", out)
    assert "no violations" in report
    assert "not checked: model.path" in report
    assert "unknown to this tool, not carried over (1):" in report
    load_config(str(out), [])


def test_the_tool_reads_standard_input_and_says_what_is_illegal():
    command = (
        "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo actor_rollout_ref.rollout.n=1 "
        "actor_rollout_ref.model.path=/m"
    )
    out, report = tool("-", "--accept", stdin=command, status=2)
    assert yaml.safe_load(out)["model"] == {"path": "/m"}
    assert "always gets the advantage 0; raise rollout.n (rollout.n=1" in report
    assert "data.train must be set to the training prompts" in report
