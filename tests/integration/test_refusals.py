"""Bad input through the command line: one message, exit status 2, before any process starts."""

import json
import shutil

import pytest
import ray

from grpo_megatron.capabilities import Capabilities
from grpo_megatron.cli import main
from tests.models import tiny_qwen3


@pytest.fixture(scope="module")
def sharded(tmp_path_factory, arithmetic):
    """A checkpoint in several shards, with the arithmetic tokenizer."""
    from transformers import AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("sharded")
    model = AutoModelForCausalLM.from_pretrained(arithmetic / "model")
    shutil.copytree(arithmetic / "model", folder, dirs_exist_ok=True)
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, max_shard_size="100KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    return folder


def refusal(capsys, arithmetic, *changes, command="train") -> str:
    was_up = ray.is_initialized()
    capsys.readouterr()
    common = [
        f"model.path={arithmetic}/model",
        f"data.train={arithmetic}/data/train.jsonl",
        "run.root=/proc/nowhere",
    ]
    common += ["data.max_prompt_length=64", "rollout.max_response_length=64"]
    assert main([command, *common, *changes]) == 2
    output = capsys.readouterr()
    assert output.err.startswith("error: ")
    assert "Traceback" not in output.err
    assert ray.is_initialized() == was_up
    return output.err


def test_a_misspelt_key(capsys, arithmetic):
    assert "did you mean 'rollout.temperature'" in refusal(capsys, arithmetic, "rollout.temprature=0.5")


def test_tp_that_does_not_divide_the_heads(capsys, arithmetic):
    message = refusal(capsys, arithmetic, "megatron.tensor_parallel=3", "megatron.pipeline_parallel=4")
    assert (
        "megatron.tensor_parallel must divide the model's attention heads (megatron.tensor_parallel=3"
        in message
    )
    assert "(megatron.tensor_parallel=3, KV heads: 2)" in message
    assert "model chunks: 4, layers: 2" in message


def test_a_missing_shard(capsys, arithmetic, sharded, tmp_path):
    shutil.copytree(sharded, tmp_path / "m")
    gone = sorted((tmp_path / "m").glob("*.safetensors"))[1]
    gone.unlink()
    assert f"lists files that are missing ({gone.name})" in refusal(
        capsys, arithmetic, f"model.path={tmp_path}/m"
    )


def test_a_truncated_shard(capsys, arithmetic, sharded, tmp_path):
    shutil.copytree(sharded, tmp_path / "m")
    cut = sorted((tmp_path / "m").glob("*.safetensors"))[1]
    cut.write_bytes(cut.read_bytes()[:-100])
    assert f"{cut} cannot be read" in refusal(capsys, arithmetic, f"model.path={tmp_path}/m")


def test_a_malformed_line(capsys, arithmetic, tmp_path):
    path = tmp_path / "train.jsonl"
    path.write_text('{"prompt": "1+1", "answer": "2"}\n{"prompt": "1+1",\n')
    assert f"{path}:2: not valid JSON" in refusal(capsys, arithmetic, f"data.train={path}")


def test_an_empty_dataset(capsys, arithmetic, tmp_path):
    path = tmp_path / "train.jsonl"
    path.write_text("\n")
    assert f"{path} contains no records" in refusal(capsys, arithmetic, f"data.train={path}")


def test_a_prompt_that_is_too_long(capsys, arithmetic, tmp_path):
    path = tmp_path / "train.jsonl"
    path.write_text('{"prompt": "1+1", "answer": "2"}\n{"prompt": "' + "1" * 80 + '", "answer": "2"}\n')
    message = refusal(capsys, arithmetic, f"data.train={path}")
    assert f"{path}:2: the prompt has 82 tokens, more than data.max_prompt_length=64" in message
    assert "data.overlong_prompts" in message


def test_wrong_field_names(capsys, arithmetic):
    message = refusal(capsys, arithmetic, "data.prompt_key=question")
    assert "train.jsonl:1: field 'question' is missing; the record has 'prompt', 'answer'" in message


def test_precisions_and_layers_that_cannot_run_here(capsys, arithmetic):
    problem = Capabilities.of_this_machine().fp8_problem
    if problem is None:
        pytest.skip("FP8 can run here")
    message = refusal(capsys, arithmetic, "megatron.precision=fp8")
    assert "megatron.precision=fp8 needs TransformerEngine and GPUs" in message
    assert f"(here: {problem})" in message


def test_a_model_for_shorter_sequences(capsys, arithmetic):
    message = refusal(
        capsys, arithmetic, "rollout.max_response_length=4000", "train.max_tokens_per_micro_batch=8192"
    )
    assert "= 4064, but" in message
    assert "supports only 2048 positions" in message


def test_a_reward_that_does_not_exist(capsys, arithmetic):
    assert "reward.function=nothing:here cannot be imported" in refusal(
        capsys, arithmetic, "reward.function=nothing:here", "run.root=/tmp"
    )


def test_a_model_that_is_not_there_or_not_known(capsys, arithmetic, tmp_path):
    assert "does not exist; model.path must be" in refusal(capsys, arithmetic, "model.path=/nowhere")
    shutil.copytree(arithmetic / "model", tmp_path / "m")
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    config["architectures"] = ["MambaForCausalLM"]
    (tmp_path / "m" / "config.json").write_text(json.dumps(config))
    assert (
        "the architecture MambaForCausalLM is not supported; supported are "
        "LlamaForCausalLM, MistralForCausalLM" in refusal(capsys, arithmetic, f"model.path={tmp_path}/m")
    )


def test_a_tokenizer_without_a_chat_template(capsys, arithmetic, tmp_path):
    shutil.copytree(arithmetic / "model", tmp_path / "m")
    (tmp_path / "m" / "chat_template.jinja").unlink()
    assert "no chat template" in refusal(capsys, arithmetic, f"model.path={tmp_path}/m")


def test_sft_needs_responses(capsys, arithmetic):
    assert "field 'response' is missing" in refusal(capsys, arithmetic, command="sft")


def test_a_folder_without_a_tokenizer(capsys, arithmetic, tmp_path):
    model = tiny_qwen3(tmp_path / "m")
    assert "tokenizer" in refusal(capsys, arithmetic, f"model.path={model}")
