import re

import pytest

from grpo_megatron.config.command import Command
from grpo_megatron.config.load import known_keys
from grpo_megatron.config.schema import OldLogprobs
from grpo_megatron.errors import UserError
from grpo_megatron.preflight.check import load_config

NEEDED = ["model.path=m", "data.train=d.jsonl"]


def error_of(*overrides, config=None, command=Command.train) -> str:
    with pytest.raises(UserError) as caught:
        load_config(config, [*NEEDED, *overrides], command)
    return str(caught.value)


def test_file_then_overrides(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("rollout: {n: 4, temperature: 0.9}\ntrain: {old_logprobs: rollout}\n")
    config = load_config(str(path), [*NEEDED, "rollout.n=6"])
    assert (config.rollout.n, config.rollout.temperature) == (6, 0.9)
    assert config.train.old_logprobs is OldLogprobs.rollout
    assert config.model.path == "m"


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("rollout.temprature=1", "rollout.temperature"),
        ("algorithm.clip_ratio_hi=0.3", "algorithm.clip_ratio_high"),
        ("train_batch_size=4", "data.train_batch_size"),
        ("megatron.tensor_paralel=2", "megatron.tensor_parallel"),
        ("optimiser.lr=1", "optimizer"),
        ("train.kl_loss_coef=0.1", "algorithm.kl_loss_coef"),
        ("rollout.engine.cpu_thread=2", "rollout.engine.cpu_threads"),
    ],
)
def test_a_misspelt_key_names_the_nearest(key, meant):
    message = error_of(key)
    assert "unknown key" in message
    assert f"did you mean {meant!r}" in message


def test_a_misspelt_key_in_a_file_names_the_file(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("rollout:\n  engine:\n    dtyp: float32\n")
    message = error_of(config=str(path))
    assert "c.yaml" in message
    assert "rollout.engine.dtype" in message


def test_a_section_is_not_a_value():
    assert "rollout is a section" in error_of("rollout=3")


@pytest.mark.parametrize(
    "value", ["rollout.n=four", "optimizer.lr=fast", "train.old_logprobs=never", "train.packing=perhaps"]
)
def test_wrong_types_name_the_key(value):
    assert value.split("=")[0].split(".")[-1] in error_of(value)


def test_missing_values_are_named():
    with pytest.raises(UserError, match=re.escape("model.path")):
        load_config(None, ["data.train=d"])
    with pytest.raises(UserError, match=re.escape("data.train")):
        load_config(None, ["model.path=m"])


def test_all_broken_rules_are_listed_at_once():
    message = error_of(
        "train.ppo_mini_batch_size=5",
        "rollout.top_p=0.9",
        "optimizer.lr=-1",
        "algorithm.loss_agg_mode=mean",
        "megatron.virtual_pipeline=2",
        "train.max_tokens_per_micro_batch=100",
    )
    for key in (
        "ppo_mini_batch_size=5",
        "rollout.top_p",
        "optimizer.lr",
        "got mean",
        "virtual_pipeline=2",
        "max_tokens_per_micro_batch=100",
    ):
        assert key in message


def test_current_logprobs_need_one_step_per_batch():
    assert "old_logprobs=current" in error_of("train.old_logprobs=current", "train.ppo_mini_batch_size=16")
    assert "old_logprobs=current" in error_of("train.old_logprobs=current", "train.ppo_epochs=2")


@pytest.mark.parametrize("text", ["noequals", "=3"])
def test_arguments_must_be_key_value(text):
    assert "key=value" in error_of(text)


def test_a_missing_or_broken_file(tmp_path):
    assert "does not exist" in error_of(config=str(tmp_path / "none.yaml"))
    path = tmp_path / "c.yaml"
    path.write_text("rollout: [")
    assert "not valid YAML" in error_of(config=str(path))
    path.write_text("- 1")
    assert "expected sections" in error_of(config=str(path))


def test_every_field_has_help_and_every_config_file_loads():
    for key, field in known_keys().items():
        assert field.description, key
    load_config("configs/quickstart.yaml", [])
    load_config("configs/quickstart_sft.yaml", [], Command.sft)


def test_a_plain_value_of_a_section_can_be_short_for_one_of_its_keys(tmp_path):
    agent = "tests.integration.agents:two_turns"
    path = tmp_path / "c.yaml"
    path.write_text(f"rollout:\n  n: 4\n  agent: {agent}\n")
    for config in (
        load_config(str(path), NEEDED),
        load_config(None, [*NEEDED, f"rollout.agent={agent}"]),
        load_config(None, [*NEEDED, f"rollout.agent.function={agent}"]),
    ):
        assert (config.rollout.agent.function, config.rollout.agent.command) == (agent, None)
    command = load_config(str(path), [*NEEDED, "rollout.agent=null", "rollout.agent.command=ls"])
    assert (command.rollout.agent.function, command.rollout.agent.command) == (None, "ls")
    assert not load_config(str(path), [*NEEDED, "rollout.agent=null"]).rollout.agent.is_set
    path.write_text("rollout:\n  agent: no_such_module:f\n")
    assert "rollout.agent.function=no_such_module:f cannot be imported" in error_of(config=str(path))
    path.write_text("rollout:\n  agent: []\n")
    assert f"{path}:2: rollout.agent.function: expected text or null, got []" in error_of(config=str(path))
    assert "unknown key 'rollout.agent.comand'; did you mean 'rollout.agent.command'?" in error_of(
        "rollout.agent.comand=ls"
    )
    both = error_of(f"rollout.agent={agent}", "rollout.agent.command=ls")
    assert "rollout.agent.function cannot be combined with rollout.agent.command: one agent" in both
