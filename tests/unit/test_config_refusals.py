"""Typing mistakes in files and on the command line. Each is refused with a hint at what was meant."""

import os

import pytest
import yaml

from grpo_megatron.cli import main
from grpo_megatron.config.earlier_versions import REMOVED_KEYS, REMOVED_VALUES, RENAMED_KEYS
from grpo_megatron.config.keys import choices_of, known_keys, nearest_key
from grpo_megatron.config.load import resolve

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
    ("rollout.stop={a: 1}", "expected list of text, got {a: 1}"),
    ("data.chat_template_args=[1]", "expected mapping, got [1]"),
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
    ("algorithm.loss_agg_mode=mean", "one of token-mean, seq-mean-token-sum"),
    ("algorithm.kl_loss_type=k4", "one of k1"),
    ("rollout.engine.dtype=half", "one of auto, float32"),
]


# (what an earlier version took, what the message must say)
OF_EARLIER_VERSIONS = [
    ("cluster.sync_bucket_bytes=1", "cluster.sync_bucket_bytes is now called weight_sync.bucket_bytes"),
    ("model.reference_path=m", "model.reference_path is now called ref.path"),
    ("ref.ahead=true", "ref.ahead no longer exists; delete it"),
    ("weight_sync.pause=retract", "weight_sync.pause no longer exists; use rollout.on_update: continue for"),
    ("mismatch.correction=rejection", "rejection; use mismatch.rejection=seq_geometric_ratio"),
    ("rollout.tools=[python, calculator]", "calculator; replace it with examples.calculator:calculator"),
    (
        "weight_sync.transport=object_store",
        "can no longer be object_store; use weight_sync.transport=auto, which sends",
    ),
]


def as_file(written: str, path) -> None:
    """Return the same setting as nested YAML."""
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
    assert str(path) in in_file or "invalid" in in_file
    return in_file, refusal(capsys, written)


@pytest.mark.slow_but(10)
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


@pytest.mark.slow_but(8)
@pytest.mark.parametrize(("written", "expected"), ILL_TYPED)
def test_a_value_of_a_wrong_type_is_refused_with_the_right_one(written, expected, capsys, tmp_path):
    key = written.partition("=")[0]
    for message in both_ways(capsys, tmp_path, written):
        assert key in message
        assert expected in message


@pytest.mark.slow_but(2)
@pytest.mark.parametrize(("written", "expected"), OF_EARLIER_VERSIONS)
def test_what_an_earlier_version_took_is_refused_with_its_successor(written, expected, capsys, tmp_path):
    for message in both_ways(capsys, tmp_path, written):
        assert expected in message


def test_successors_exist_and_what_they_replace_does_not():
    known = known_keys()
    assert set(RENAMED_KEYS.values()) <= known.keys()
    assert not (RENAMED_KEYS.keys() | REMOVED_KEYS.keys()) & known.keys()
    assert {key for key, _ in REMOVED_VALUES} <= known.keys()
    for key, value in REMOVED_VALUES:
        assert value not in choices_of(known[key].annotation)
    written = {setting.partition("=")[0] for setting, _ in OF_EARLIER_VERSIONS}
    assert written == {*RENAMED_KEYS, *REMOVED_KEYS, *(key for key, _ in REMOVED_VALUES)}


def test_there_are_as_many_as_promised():
    assert len(MISSPELT) + len(ILL_TYPED) >= 40
    assert len({written for written, _ in MISSPELT + ILL_TYPED}) == len(MISSPELT) + len(ILL_TYPED)


# (the file, what the message must say)
FILES = [
    (
        "rollout:\n  n: 4\n  n: 8\n",
        'c.yaml: not valid YAML: while constructing a mapping, found duplicate key "n" (line 3)',
    ),
    (
        "rollout: {n: 4}\ndata: {shuffle: true}\nrollout: {n: 8}\n",
        'found duplicate key "rollout" (line 3)',
    ),
    ("data:\n  train: [{a: 1, a: 2}]\n", 'found duplicate key "a" (line 2)'),
    ("rollout.n: 4\n", "nest it"),
    ("rollout:\n  n: ${rollout.m}\n", "rollout.m"),
    ("rollout:\n  n: ${rollout.m\n", "rollout.n"),
    ("rollout:\n  n: ${rollout.n}\n", "Recursive interpolation"),
    ("rollout: {n: '${rollout.max_turns}', max_turns: '${rollout.n}'}\n", "Recursive interpolation"),
    ("rollout:\n  n: ${no_such:1}\n", "no_such"),
    ("rollout: ${data}\n", "rollout is a section"),
    ("nothing: ${data}\n", "unknown key 'nothing'"),
    ("rollout:\n\tn: 4\n", "not valid YAML"),
    ("rollout: 4\n", "rollout is a section"),
    ("rollout:\n", "rollout is a section"),
    ("algorithm: []\n", "algorithm is a section"),
    ("algorithm: {preset: [a]}\n", "algorithm.preset=['a'] is unknown"),
    ("just text", "expected sections"),
    ("- 1\n", "expected sections"),
    ("2024-01-01\n", "expected sections"),
    ("1: {n: 4}\n", "unknown key '1'"),
    ("null: {n: 4}\n", "unknown key 'null'"),
    ("'': {n: 4}\n", "unknown key ''"),
    ("rollout: {'': 4}\n", "unknown key 'rollout.'"),
    ("? [a, b]\n: 4\n", "a key must be a single word (line 1)"),
    ("k" * 900 + ": 4\n", "unknown key 'kkk"),
    ("rollout: {n: 2024-01-01}\n", "integer"),
    ("rollout: {n: 2024-13-45}\n", "integer"),
    ("rollout: {n: 1:30}\n", "integer"),
    ("rollout:\n  n: ???\n", "rollout.n has no value"),
    ("optimizer: {lr: .nan}\n", "c.yaml:1: optimizer.lr must be a finite number, but is .nan"),
    ("run: {name: *n}\n", "undefined alias 'n'"),
    ("eval: {<<: 5}\n", "not valid YAML"),
    ("run: !!python/object:os.system {name: a}\n", "could not determine a constructor for the tag"),
    ("run: {name: !ours a}\n", "could not determine a constructor for the tag '!ours'"),
    ("a: 1\n---\nb: 2\n", "another document"),
    ("%YAML 9.9\n---\nrun: {}\n", "not valid YAML"),
    (b"\xff\xfe", "c.yaml is not UTF-8 text (invalid start byte at byte 0)"),
    (bytes(range(128)), "not valid YAML"),
]


@pytest.mark.slow_but(15)
@pytest.mark.parametrize(("text", "part"), FILES, ids=[str(text[:30]) for text, _ in FILES])
def test_files_that_mean_nothing_are_refused(text, part, capsys, tmp_path):
    path = tmp_path / "c.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    message = refusal(capsys, "--config", str(path))
    assert part in message
    assert len(message) < 1000
    assert main(["config", "check", "--config", str(path)]) == 2
    assert part in capsys.readouterr().err


@pytest.mark.slow_but(6)
@pytest.mark.parametrize(
    ("argument", "part"),
    [
        ("rollout.n=[", "argument 'rollout.n=[': not valid YAML"),
        ("rollout.n=", "integer"),
        ("rollout.n=%", "not valid YAML"),
        ("rollout.n=1\n---\n2", "another document"),
        ("rollout[n]=4", "unknown key 'rollout[n]'"),
        ("rollout..n=4", "unknown key 'rollout.'"),
        ("rollout.=4", "unknown key 'rollout.'"),
        ("k" * 100_000 + "=4", "unknown key 'kkk"),
        ("run.name=\udcff", "not valid YAML: unacceptable character"),
        ("data.chat_template_args={a: 1, a: 2}", 'found duplicate key "a" (line 1)'),
        ("data.train=[d.jsonl, 5]", "data.train must be"),
        ("data.train=5", "data.train must be"),
        ("rollout.engine.tensor_parallel=0", "rollout.engine.tensor_parallel"),
        ("algorithm.adv_estimator=..:x", "'..' is not a module name"),
        ("rollout.environment=a b:x", "'a b' is not a module name"),
    ],
)
def test_arguments_that_mean_nothing_are_refused(argument, part, capsys):
    """The message names the argument, the key and the fault. Messages used to lack the key."""
    assert main(["train", "model.path=m", "data.train=d.jsonl", argument]) == 2
    message = capsys.readouterr().err
    assert message.startswith("error: ")
    assert part in message
    assert len(message) < 1000
    assert main(["config", "check", "model.path=m", "data.train=d.jsonl", argument]) == 2
    assert part in capsys.readouterr().err


def test_what_is_given_as_a_file_and_is_none(capsys, tmp_path):
    (tmp_path / "link").symlink_to("nowhere")
    os.mkfifo(tmp_path / "pipe")
    for path, part in (
        (tmp_path, "is a folder, not a file"),
        (tmp_path / "none", "does not exist"),
        (tmp_path / "link", "is a broken symbolic link"),
        (tmp_path / "pipe", "is not a regular file"),
        ("README.md/c.yaml", "cannot exist, because part of the path is a file"),
        ("x" * 300, "cannot be read: File name too long"),
    ):
        assert f"--config {path} {part}" in refusal(capsys, "--config", str(path))
        for key in ("model.path", "ref.path", "data.train", "data.eval", "run.resume", "rollout.replay"):
            status = main(["config", "check", "model.path=/nowhere", "data.train=/nowhere", f"{key}={path}"])
            text = capsys.readouterr()
            fits = "is a folder" in part and key in ("model.path", "ref.path", "run.resume")
            if part == "does not exist":
                assert (status, f"not checked: {key}: {path}" in text.out) == (0, True)
            elif not fits:
                assert status == 2
                parts = (part, "is a file, not a folder", "is not a recording")  # which is a folder
                assert any(f"{path} {one}" in text.err for one in parts)


def test_what_yaml_would_read_into_a_text_stays_text(tmp_path):
    path = tmp_path / "c.yaml"
    for text in ("2024-01-01", "2024-13-45", "1:30", "007", "=", "1e-6", "v1.0"):
        path.write_text(f"run: {{name: {text}}}\n")
        assert resolve(str(path), []).values["run.name"] == text
        assert resolve(None, [f"run.name={text}"]).values["run.name"] == text


def test_anchors_aliases_and_merge_keys_are_legal(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text(
        "rollout: &sampling\n  n: &count 4\n  temperature: 0.5\neval:\n  <<: {every: 3, n: 2}\n  n: *count\n"
    )
    found = resolve(str(path), [])
    assert (found.values["eval.n"], found.values["eval.every"], found.values["rollout.n"]) == (4, 3, 4)
    assert (found.origins["eval.n"], found.origins["eval.every"]) == (f"{path}:6", f"{path}:5")


def test_references_are_followed(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("rollout: {n: '${eval.n}'}\neval: {n: 6}\n")
    assert resolve(str(path), []).values["rollout.n"] == 6


def test_a_module_that_fails_when_imported(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken_plugin.py").write_text("x = 1\nraise KeyError('gone')\n")
    (tmp_path / "unreadable_plugin.py").write_text("def (:\n")
    assert "cannot be imported: KeyError: 'gone' (" in refusal(
        capsys, "algorithm.adv_estimator=broken_plugin:f"
    )
    assert "broken_plugin.py:2)" in refusal(capsys, "algorithm.surrogate=broken_plugin:f")
    assert "cannot be imported: SyntaxError" in refusal(capsys, "algorithm.filters=[unreadable_plugin:f]")
    assert main(["config", "check", "model.path=m", "data.train=d", "reward.function=broken_plugin:f"]) == 2
    assert "KeyError: 'gone'" in capsys.readouterr().err
