"""What people mistype, in files and on the command line: each refused with what was meant."""

import pytest
import yaml

from grpo_megatron.cli import main
from grpo_megatron.config.load import known_keys, nearest_key

# (as written, the key that was meant)
MISSPELT = [
    ("rollout.temprature=1", "rollout.temperature"),
    ("rollout.N=4", "rollout.n"),
    ("rollout.max_reponse_length=64", "rollout.max_response_length"),
    ("rollout.engine.num_engine=2", "rollout.engine.num_engines"),
    ("rollout.engine.tensor_paralel=2", "rollout.engine.tensor_parallel"),
    ("rollout.engine.memory_fraction=0.5", "rollout.engine.mem_fraction"),
    ("rollout.tensor_parallel=2", "rollout.engine.tensor_parallel"),
    ("algorithm.adv_estimater=grpo", "algorithm.adv_estimator"),
    ("algorithm.clip_ratio_hi=0.3", "algorithm.clip_ratio_high"),
    ("algorithm.clip_ratio_lower=0.3", "algorithm.clip_ratio_low"),
    ("algorithm.loss_agg_func=token-mean", "algorithm.loss_agg_mode"),
    ("algorithm.kl_coef=0.1", "algorithm.kl_ctrl.kl_coef"),
    ("algorithm.entropy_coef=0.1", "algorithm.entropy_coeff"),
    ("algorithm.use_kl=true", "algorithm.use_kl_loss"),
    ("algoritm.use_kl_loss=true", "algorithm.use_kl_loss"),
    ("algorithm.norm_adv_by_std=false", "algorithm.norm_adv_by_std_in_grpo"),
    ("train.kl_loss_coef=0.1", "algorithm.kl_loss_coef"),
    ("train.ppo_epoch=2", "train.ppo_epochs"),
    ("train.mini_batch_size=8", "train.ppo_mini_batch_size"),
    ("train.max_tokens_per_microbatch=9", "train.max_tokens_per_micro_batch"),
    ("train.old_logprob=rollout", "train.old_logprobs"),
    ("train.train_batch_size=8", "data.train_batch_size"),
    ("data.batch_size=8", "data.train_batch_size"),
    ("data.promt_key=question", "data.prompt_key"),
    ("data.max_prompt_len=9", "data.max_prompt_length"),
    ("data.overlong_prompt=skip", "data.overlong_prompts"),
    ("actor_rollout_ref.rollout.n=8", "rollout.n"),
    ("model.paht=x", "model.path"),
    ("megatron.tensor_paralel=2", "megatron.tensor_parallel"),
    ("megatron.tensor_model_parallel_size=2", "megatron.tensor_parallel"),
    ("megatron.sequence_paralel=true", "megatron.sequence_parallel"),
    ("megatron.recompute_module=[mlp]", "megatron.recompute_modules"),
    ("optimiser.lr=1", "optimizer.lr"),
    ("optimizer.weightdecay=1", "optimizer.weight_decay"),
    ("optimizer.lr_warmup_step=3", "optimizer.lr_warmup_steps"),
    ("optimizer.grad_clip=1", "optimizer.clip_grad"),
    ("mismatch.treshold=2", "mismatch.threshold"),
    ("reward.overlong_buffer.len=8", "reward.overlong_buffer.length"),
    ("checkpoint.export_hf_model=true", "checkpoint.export_hf"),
    ("eval.top_k=1", "rollout.top_k"),
]

# (as written, what the message must say beside the key)
ILL_TYPED = [
    ("rollout.n=four", "integer"),
    ("rollout.n=4.5", "integer"),
    ("rollout.n=true", "integer"),
    ("rollout.n=[4]", "integer"),
    ("rollout.n=null", "integer"),
    ("rollout.temperature=warm", "number"),
    ("rollout.stop=end", "list of text"),
    ("rollout.stop_token_ids=[a]", "list of integer"),
    ("rollout.engine=2", "is a section; set its keys, such as rollout.engine.num_engines"),
    ("rollout=null", "is a section"),
    ("algorithm=grpo", "is a section; set its keys"),
    ("optimizer.lr=fast", "number"),
    ("optimizer.lr=", "number"),
    ("optimizer.lr_decay_steps=1.5", "integer or null"),
    ("train.old_logprobs=never", "one of recompute, rollout, current"),
    ("train.packing=perhaps", "true or false"),
    ("train.packing=2", "true or false"),
    ("megatron.precision=fp16", "one of fp32, bf16, fp8"),
    ("megatron.pipeline_layers=4", "list of integer"),
    ("megatron.overlap={a: 1}", "true or false"),
    ("data.train_weights=[1, much]", "list of number"),
    ("data.prompt_key=[a]", "text"),
    ("mismatch.action=panic", "one of off, warn, mask, stop"),
    ("cluster.placement=together", "one of colocated, separate"),
    ("algorithm.loss_agg_mode=mean", "choose one of token-mean, seq-mean-token-sum"),
    ("algorithm.kl_loss_type=k4", "choose one of k1"),
    ("rollout.engine.dtype=half", "choose one of auto, float32"),
]


def as_file(written: str, path) -> None:
    """The same setting as nested YAML."""
    key, _, value = written.partition("=")
    tree = yaml.safe_load(value) if value else None
    for name in reversed(key.split(".")):
        tree = {name: tree}
    path.write_text(yaml.safe_dump(tree))


def refusal(capsys, *arguments) -> str:
    assert main(["train", *arguments, "model.path=m", "data.train=d.jsonl"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert "Traceback" not in err
    return err


def both_ways(capsys, tmp_path, written):
    path = tmp_path / "c.yaml"
    as_file(written, path)
    in_file = refusal(capsys, "--config", str(path))
    # A rule speaks of keys alone; what the schema refuses, it refuses at its place.
    assert str(path) in in_file or "not legal" in in_file
    return in_file, refusal(capsys, written)


@pytest.mark.parametrize(("written", "meant"), MISSPELT)
def test_a_misspelt_key_is_refused_with_the_one_that_was_meant(written, meant, capsys, tmp_path):
    key = written.partition("=")[0]
    section = key.partition(".")[0]
    for message in both_ways(capsys, tmp_path, written):
        # A section that does not exist is refused by its own name, before the keys in it.
        if f"unknown key {key!r}" in message:
            assert f"did you mean {meant!r}?" in message
        else:
            assert section not in known_keys()
            assert f"unknown key {section!r}" in message
            assert nearest_key(key) == meant


@pytest.mark.parametrize(("written", "expected"), ILL_TYPED)
def test_a_value_of_a_wrong_type_is_refused_with_the_right_one(written, expected, capsys, tmp_path):
    key = written.partition("=")[0]
    for message in both_ways(capsys, tmp_path, written):
        assert key in message
        assert expected in message


def test_there_are_as_many_as_promised():
    assert len(MISSPELT) + len(ILL_TYPED) >= 40
    assert len({written for written, _ in MISSPELT + ILL_TYPED}) == len(MISSPELT) + len(ILL_TYPED)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("rollout:\n  n: 4\n  n: 8\n", "c.yaml:3: rollout.n is already set in line 2"),
        ("rollout: {n: 4}\ndata: {shuffle: true}\nrollout: {n: 8}\n", "c.yaml:3: rollout is already set in line 1"),
        ("rollout.n: 4\n", "nest it"),
        ("rollout:\n  n: ${rollout.m}\n", "rollout.m"),
        ("rollout:\n\tn: 4\n", "not valid YAML"),
        ("rollout: 4\n", "rollout is a section"),
        ("rollout:\n", "rollout is a section"),
        ("just text", "expected sections"),
        ("1: {n: 4}\n", "unknown key '1'"),
    ],
)
def test_files_that_mean_nothing_are_refused(text, part, capsys, tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text(text)
    assert part in refusal(capsys, "--config", str(path))
