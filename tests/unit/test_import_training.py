"""Differences in what an import would train are listed first. It is not written unless they are accepted."""

import json
from functools import partial

import pytest
import yaml

from grpo_megatron.errors import UserError
from grpo_megatron.importers import RLINF, VERL, import_settings, read_settings
from tests.tools import run_tool

BASE = {
    "algorithm.adv_estimator": "grpo",
    "actor_rollout_ref.rollout.n": 8,
    "actor_rollout_ref.model.path": "/models/m",
    "data.train_files": "/d.parquet",
    "trainer.total_training_steps": 200,
}
GIVEN = {"reward.function": "math"}


def command(changes=None, program="verl.trainer.main_ppo"):
    return f"python3 -m {program} " + " ".join(
        f"'{key}={value}'" for key, value in (BASE | (changes or {})).items()
    )


def verl(changes=None, given=None, program="verl.trainer.main_ppo"):
    return import_settings(VERL, read_settings(command(changes, program)), given)


def rlinf(tree):
    return import_settings(RLINF, read_settings(yaml.safe_dump(tree)))


def test_a_run_whose_reward_is_given_needs_no_acceptance():
    result = verl(given=GIVEN)
    assert (result.changes_training, result.unknown, result.needs_acceptance) == ([], [], False)
    assert result.values["data.answer_key"] == "reward_model.ground_truth"
    assert result.values["reward.function"] == "math"


ACTOR, ROLLOUT, MODEL = (f"actor_rollout_ref.{name}" for name in ("actor", "rollout", "model"))


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        (f"{MODEL}.lora_rank", 32, "full fine-tuning"),
        (f"{MODEL}.lora.rank", 32, "full fine-tuning"),
        (f"{MODEL}.lora_adapter_path", "/a", "full fine-tuning"),
        (f"{MODEL}.path", "Qwen/Qwen2.5-VL-7B-Instruct", "only text"),
        ("data.image_key", "images", "only text"),
        (f"{MODEL}.mtp.enable_train", True, "several tokens"),
        ("custom_reward_function.path", "r.py", "module:function"),
        ("reward_model.enable", True, "reward.function=model"),
        ("reward_model.reward_manager", "prime", "module:function"),
        ("reward_model.sandbox_fusion.url", "u", "sandbox"),
        ("algorithm.adv_estimator", "gae", "no critic"),
        ("algorithm.use_pf_ppo", True, "drawn again"),
        (f"{ROLLOUT}.top_p", 0.9, "the distribution that is sampled from"),
        (f"{ROLLOUT}.top_k", 50, "the distribution that is sampled from"),
        (f"{ROLLOUT}.multi_turn.enable", True, "rollout.environment"),
        (f"{ROLLOUT}.multi_turn.tool_config_path", "t.yaml", "rollout.tools=[module:function, mcp:SERVER]"),
        (f"{ROLLOUT}.multi_turn.function_tool_path", "t.py", "each function of this file in rollout.tools"),
        ("data.function_tool_path", "t.py", "each function of this file in rollout.tools"),
        (f"{ROLLOUT}.multi_turn.interaction_config_path", "t.yaml", "rollout.agent"),
        (f"{ROLLOUT}.agent.default_agent_loop", "tool_agent", "rollout.environment"),
        (f"{ROLLOUT}.agent.default_agent_loop", "my_agent", "rollout.environment"),
        (f"{ROLLOUT}.over_sample_rate", 0.1, "waited for"),
        (f"{ACTOR}.new_key", 1.0, "may decide"),
        (f"{ACTOR}.optim.lr", "$LR", "not known here"),
        ("data.train_batch_size", "many", "integer"),
        ("data.sampler.class_path", "x", "order"),
    ],
)
def test_what_is_trained_otherwise_must_be_accepted(key, value, reason):
    result = verl({key: value}, {} if "reward" in key else GIVEN)
    assert any(line.startswith(f"{key}=") and reason in line for line in result.changes_training), (
        result.changes_training
    )
    assert result.needs_acceptance
    assert result.report().startswith("changes what is trained")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        (f"{MODEL}.lora_rank", 0),
        (f"{ROLLOUT}.multi_turn.enable", False),
        (f"{ROLLOUT}.agent.default_agent_loop", "single_turn_agent"),
        (f"{ROLLOUT}.top_k", 0),
        (f"{ROLLOUT}.name", "vllm"),
        ("algorithm.lam", 0.95),
        ("reward_model.enable", False),
        (f"{ACTOR}.strategy", "fsdp"),
    ],
)
def test_what_changes_nothing_needs_no_acceptance(key, value):
    assert verl({key: value}, GIVEN).changes_training == []


def test_steps_and_reward_are_settled_by_hand():
    epochs = {"trainer.total_training_steps": "null", "trainer.total_epochs": 15}
    assert [line.partition("=")[0].partition(":")[0] for line in verl(epochs).changes_training] == [
        "trainer.total_epochs",
        "reward",
    ]
    result = verl(epochs, GIVEN | {"run.total_steps": 435})
    assert result.changes_training == []
    assert result.values["run.total_steps"] == 435


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            {
                "+reward_model.reward_kwargs.overlong_buffer_cfg.enable": True,
                "+reward_model.reward_kwargs.overlong_buffer_cfg.len": 128,
                "+reward_model.reward_kwargs.overlong_buffer_cfg.penalty_factor": 0.5,
                "+reward_model.reward_kwargs.max_resp_len": 512,
            },
            {"reward.overlong_buffer.length": 128, "reward.overlong_buffer.penalty": 0.5},
        ),
        ({f"{ACTOR}.router_replay.mode": "R2"}, {"moe.routing_replay": "old_policy"}),
        ({f"{ACTOR}.router_replay.mode": "R3"}, {"moe.routing_replay": "engine"}),
        ({f"{ACTOR}.router_replay.mode": "disabled"}, {"moe.routing_replay": "off"}),
        ({f"{ACTOR}.fsdp_config.optimizer_offload": True}, {"optimizer.offload": True}),
        (
            {f"+{ACTOR}.megatron.override_transformer_config.moe_z_loss_coeff": 0.001},
            {"moe.z_loss_coeff": 0.001},
        ),
        ({"data.max_response_length": 40000}, {"train.max_tokens_per_micro_batch": 40512}),
    ],
)
def test_what_has_a_counterpart_is_carried(changes, expected):
    result = verl(changes, GIVEN)
    assert {key: result.values.get(key) for key in expected} == expected
    assert result.changes_training == []


def tool_files(folder, servers, tool=None):
    """Write verl's tools.yaml and servers.json into a folder."""
    kind = {"mcp_servers_config_path": "servers.json", "tool_selected_list": ["search"]}
    tools = [{"class_name": "verl.tools.mcp_search_tool.MCPSearchTool", "mcp": kind}]
    (folder / "tools.yaml").write_text(yaml.safe_dump({"tools": [tool] if tool else tools}))
    (folder / "servers.json").write_text(json.dumps({"mcpServers": servers}))
    return {
        f"{ROLLOUT}.multi_turn.enable": True,
        f"{ROLLOUT}.multi_turn.tool_config_path": "tools.yaml",
        f"{ROLLOUT}.agent.default_agent_loop": "tool_agent",
    }


@pytest.mark.parametrize(
    ("server", "expected"),
    [
        ({"url": "https://a.org/mcp"}, {"url": "https://a.org/mcp", "tools": ["search"]}),
        (
            {"command": "npx", "args": ["-y", "s"], "env": {"LEVEL": "2", "TAVILY_API_KEY": "hush"}},
            {
                "command": ["npx", "-y", "s"],
                "env": {"LEVEL": "2"},
                "pass_env": ["TAVILY_API_KEY"],
                "tools": ["search"],
            },
        ),
    ],
)
def test_mcp_servers_are_carried(tmp_path, monkeypatch, server, expected):
    monkeypatch.chdir(tmp_path)
    result = verl(tool_files(tmp_path, {"My Server": server}), GIVEN)
    assert result.changes_training == []
    assert result.values["rollout.environment"] == "tools"
    assert result.values["rollout.tools"] == ["mcp:My_Server"]
    assert result.values["rollout.mcp"] == {"My_Server": expected}
    assert "hush" not in result.report()


@pytest.mark.parametrize(
    ("servers", "tool", "reason"),
    [
        ({"a": {"url": "https://a.org", "auth_token": "hush"}}, None, "token_env: VARIABLE"),
        ({"a": {"url": "https://a.org/sse"}}, None, "streamable HTTP"),
        ({"a": {"url": "https://a.org", "headers": {"Authorization": "hush"}}}, None, "gets a token"),
        ({"a": {"url": "u"}, "b": {"url": "v"}}, None, "which of the servers a, b has which tool"),
        ({"a": {}}, None, "is no tool configuration of verl"),
        ({}, {"class_name": "my.Tool", "config": {}}, "my.Tool is a Python class; write a function for it"),
        ({}, {"tool_schema": {}}, "is no tool configuration of verl"),
    ],
)
def test_tools_that_cannot_be_carried(tmp_path, monkeypatch, servers, tool, reason):
    monkeypatch.chdir(tmp_path)
    (line,) = verl(tool_files(tmp_path, servers, tool), GIVEN).changes_training
    assert line.startswith(f"{ROLLOUT}.multi_turn.tool_config_path=tools.yaml: ")
    assert reason in line
    assert "hush" not in line


def test_another_trainer_and_another_base_configuration_must_be_accepted():
    assert "main_dapo" in verl(given=GIVEN, program="recipe.dapo.main_dapo").changes_training[0]
    based = import_settings(
        VERL, read_settings(f"{command()} --config-name my_base --config-path ./config"), GIVEN
    )
    assert "--config-name=my_base" in based.changes_training[0]
    shipped = import_settings(
        VERL,
        read_settings(f"{command()} --config-path=config --config-name=ppo_megatron_trainer.yaml"),
        GIVEN,
    )
    assert shipped.changes_training == []
    with pytest.raises(UserError, match="not a reinforcement learning program"):
        verl(program="verl.trainer.fsdp_sft_trainer")
    assert verl(given=GIVEN, program="/data/sft/verl/trainer/main_ppo.py")


def test_rlinf_tasks_and_parts_that_are_not_here():
    run = {"runner": {"task_type": "reasoning", "max_steps": 3}, "reward": {"reward_type": "math"}}
    assert rlinf(run).changes_training == []
    assert rlinf(run | {"data": {"apply_chat_template": False}}).values["data.chat_template"] == "none"
    with pytest.raises(UserError, match="only RLinf's reasoning"):
        rlinf({"runner": {"task_type": "embodied"}})
    other = run | {
        "data": {"image_keys": ["image"]},
        "agentloop": {"max_turns": 2},
        "rollout": {"model": {"model_type": "qwen2.5_vl"}},
        "defaults": [
            "override hydra/job_logging",
            {"../hybrid_engines/fsdp@actor.fsdp_config": None},
            "base_train",
        ],
    }
    lines = " ".join(rlinf(other).changes_training)
    for part in ("image_keys", "agentloop.max_turns", "model_type=qwen2.5_vl", "base_train"):
        assert part in lines
    assert "hybrid_engines" not in lines


def test_verl_without_an_estimator_is_not_grpo():
    result = import_settings(VERL, read_settings("python3 -m verl.trainer.main_ppo data.train_batch_size=8"))
    assert any(
        line.startswith("algorithm.adv_estimator ") and "gae" in line for line in result.changes_training
    )


# the tool


tool = partial(run_tool, "import_config")


def test_nothing_is_written_without_acceptance(tmp_path):
    out = tmp_path / "ours.yaml"
    printed, report = tool("-", "--out", out, stdin=command(), status=2)
    assert printed == ""
    assert not out.exists()
    assert report.startswith("changes what is trained, or is not known (1):\n  - reward: ")
    tool("-", "--accept", "--out", out, stdin=command(), status=0)
    assert yaml.safe_load(out.read_text())["data"]["train"] == "/d.parquet"
    printed, _ = tool("-", "reward.function=math", stdin=command(), status=0)
    assert yaml.safe_load(printed)["reward"] == {"function": "math"}


def test_what_cannot_be_read_or_written_is_one_error(tmp_path):
    binary, listed = tmp_path / "run.sh", tmp_path / "list.yaml"
    binary.write_bytes(b"\xff\xfe\x00")
    listed.write_text("- 1\n")
    for arguments, message in (
        (["/nowhere.sh"], "cannot be read"),
        ([tmp_path], "contains no .hydra/overrides.yaml"),
        ([binary], "cannot be read"),
        ([listed], "the top level must be YAML sections"),
        (["-", "reward.funktion=x"], "unknown key"),
        (["-", "--accept", "--out", tmp_path / "none" / "x.yaml"], "cannot be written"),
        (["-", "--accept", "--out", tmp_path], "cannot be written"),
    ):
        _, report = tool(*arguments, stdin=command(), status=2)
        assert message in report.splitlines()[-1]


def test_the_survey_counts_what_becomes_of_each_file(tmp_path):
    (tmp_path / "grpo.sh").write_text(command())
    (tmp_path / "lora.sh").write_text(command({f"{MODEL}.lora_rank": 8}))
    (tmp_path / "sft.sh").write_text(command(program="verl.trainer.sft_trainer"))
    printed, _ = tool("--survey", tmp_path, "--from", "verl", "reward.function=math", status=0)
    *lines, totals = printed.splitlines()
    assert [line.split("  ")[0].strip() for line in lines] == ["legal", "needs --accept", "refused"]
    assert json.loads(totals) == {"files": 3, "legal": 1, "needs --accept": 1, "refused": 1}
