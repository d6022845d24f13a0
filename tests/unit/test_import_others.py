"""Launch files of systems that cannot be imported are named, and no file of verl or RLinf is taken for
one.
"""

from functools import partial
from pathlib import Path

import pytest

from grpo_megatron.errors import UserError
from grpo_megatron.importers import RLINF, import_settings, read_settings
from grpo_megatron.importers.others import OTHERS, refusal
from tests.tools import run_tool

DATA = Path(__file__).parent / "data"

# As their documentation writes such files, with names and values of our own.
FILES = {
    "slime": [
        """
CKPT_ARGS=(--hf-checkpoint /m --ref-load /m_dist)
ROLLOUT_ARGS=(--rollout-batch-size 32 --n-samples-per-prompt 8)
ray job submit -- python3 train.py --actor-num-nodes 1 ${CKPT_ARGS[@]} ${ROLLOUT_ARGS[@]} \
--advantage-estimator grpo
""",
        "python3 train_async.py --num-rollout 100 --rm-type math --sglang-mem-fraction-static 0.7",
    ],
    "OpenRLHF": [
        "python3 -m openrlhf.cli.train_ppo_ray --vllm.num_engines 4 --rollout.batch_size 128 "
        "--algo.kl.init_coef 0.01",
        "ray job submit -- python3 -m openrlhf.cli.train_ppo_ray --pretrain m --vllm_num_engines 4 "
        "--n_samples_per_prompt 8",
    ],
    "TRL": [
        "trl grpo --model_name_or_path m --dataset_name d --num_generations 8",
        "accelerate launch grpo.py --per_device_train_batch_size 4 --use_vllm --max_completion_length 256",
        "model_name_or_path: m\ndataset_name: d\nnum_generations: 8\nper_device_train_batch_size: 4\n",
    ],
    "prime-rl": [
        'max_steps = 20\n\n[model]\nname = "m"\n\n[orchestrator]\nbatch_size = 128\n\n'
        '[[orchestrator.train.env]]\nid = "e"\n\n[trainer]\n',
        "seq_len = 2048\n[trainer.optim]\nlr = 3e-6\n[inference]\n",
        "uv run rl @ configs/rl.toml\n[orchestrator]\n",
    ],
    "NeMo-RL": [
        "grpo:\n  num_prompts_per_step: 32\n  num_generations_per_prompt: 16\nloss_fn: {}\n"
        "policy:\n  model_name: m\n",
        "uv run examples/run_grpo.py --config c.yaml grpo.max_num_steps=9 policy.model_name=m "
        "logger.wandb_enabled=True",
        "defaults: ../grpo_math_1B.yaml\npolicy:\n  model_name: m\n  megatron_cfg: {enabled: true}\n",
    ],
    "AReaL": [
        "experiment_name: e\ntrial_name: t\nallocation_mode: sglang:d4\ngconfig: {n_samples: 4}\n"
        "actor: {path: m, optimizer: {lr: 1}}\n",
        "actor:\n  backend: fsdp:d8\n  mb_spec: {max_tokens_per_mb: 1024}\ntrain_dataset:\n  batch_size: 8\n",
        "python3 -m areal.launcher.local examples/gsm8k.py --config g.yaml experiment_name=e trial_name=t\n",
    ],
}  # fmt: skip


@pytest.mark.parametrize(("name", "text"), [(name, text) for name, texts in FILES.items() for text in texts])
def test_a_file_of_another_system_is_named(name, text):
    """A file of another system used to be taken for one of verl or RLinf, or was said to contain nothing."""
    with pytest.raises(UserError) as error:
        read_settings(text)
    assert f"this is a file of {name} (" in str(error.value)
    assert (
        "only launch files of verl and RLinf can be imported; start from a configuration in docs/recipes.md"
        in str(error.value)
    )


def test_each_system_that_is_named_has_a_file_here():
    assert FILES.keys() == {other.name for other in OTHERS}


def test_the_tool_names_it_whatever_system_is_asked_for(tmp_path):
    path = tmp_path / "grpo.yaml"
    path.write_text(FILES["AReaL"][0])
    tool = partial(run_tool, "import_config")
    for asked in ([], ["--from", "rlinf"]):
        _, report = tool(path, *asked, "--accept", status=2)
        assert "this is a file of AReaL" in report
    (tmp_path / "rl.toml").write_text(FILES["prime-rl"][0])
    printed, _ = tool("--survey", tmp_path, status=0)
    assert printed.count("refused") == 3  # two files, and the sum
    assert "this is a file of prime-rl" in printed


def test_a_file_of_which_most_keys_are_unknown_is_none_of_theirs():
    """A file of an unknown system used to be taken for RLinf's, because it has a section `data` too."""
    settings = read_settings("generation: {temperature: 1, top_p: 1, n: 4}\ndata: {shuffle: true}\n")
    with pytest.raises(
        UserError, match="only 1 of 4 keys are RLinf keys; give a complete RLinf configuration"
    ):
        import_settings(RLINF, settings)


OURS = [
    (DATA / "verl_grpo.sh").read_text(),
    (DATA / "rlinf_grpo.yaml").read_text(),
    *(path.read_text() for path in sorted(Path("configs").glob("*.yaml"))),
    # One mark may stand anywhere.
    "python3 train.py a.b=1",
    "policy:\n  a: 1\n",
    "model_name_or_path: m\nper_device_train_batch_size: 4\ngradient_accumulation_steps: 2\n",
    "experiment_name: e\ntrial_name: t\n",
    "[trainer]\nname = 1\n",
    # verl and RLinf may name the others.
    (
        "# as in grpo.num_steps=1, num_prompts_per_step\n"
        "python3 -m verl.trainer.main_ppo data.train_files=d --rm-type x --ref-load y\n"
    ),
    "runner:\n  task_type: reasoning\npolicy: {}\nloss_fn: {}\n",
]


@pytest.mark.parametrize("text", OURS, ids=lambda text: text[:30])
def test_other_files_are_not_taken_for_one(text):
    assert refusal(text) is None
