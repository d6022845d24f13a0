"""`grpo-megatron config ...` through the command line, on real files."""

import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from grpo_megatron.cli import main
from grpo_megatron.config.keys import default_of, type_name, value_text
from grpo_megatron.config.load import known_keys
from grpo_megatron.config.origins import resolve
from grpo_megatron.preflight.docs import COMMAND
from grpo_megatron.preflight.keys import choices, interacting_keys, limits
from grpo_megatron.preflight.load import load_config

QUICKSTART = "configs/quickstart.yaml"
CONFIGS = sorted(map(str, Path("configs").glob("*.yaml")))


def config(capsys, *arguments, status=0) -> str:
    assert main(["config", *map(str, arguments)]) == status
    out, err = capsys.readouterr()
    return out + err


def leaf_keys():
    return [key for key, field in known_keys().items() if not dataclasses.is_dataclass(field.type)]


# show


@pytest.mark.slow_but(3)
@pytest.mark.parametrize("path", CONFIGS)
def test_what_show_prints_loads_to_the_same_configuration(path, capsys, tmp_path):
    for flags in ([], ["--only-set"]):
        shown = tmp_path / "shown.yaml"
        shown.write_text(config(capsys, "show", "--config", path, *flags, "rollout.n=3"))
        assert resolve(str(shown), []).values == resolve(path, ["rollout.n=3"]).values


def test_show_says_where_each_value_comes_from(capsys):
    lines = config(capsys, "show", "--config", QUICKSTART, "rollout.n=4", "optimizer.lr=3e-4").splitlines()
    number = next(
        n
        for n, line in enumerate(Path(QUICKSTART).read_text().splitlines(), 1)
        if "max_response_length" in line
    )
    assert f"  max_response_length: 32  # {QUICKSTART}:{number}" in lines
    assert "  n: 4  # command line" in lines
    assert "  lr: 0.0003  # command line" in lines
    assert "  temperature: 1.0  # default" in lines


def test_values_can_be_before_and_behind_options(capsys):
    shown = config(
        capsys, "show", "rollout.n=4", "--config", QUICKSTART, "rollout.n=5", "--only-set", "run.seed=7"
    )
    assert "  n: 5  # command line" in shown
    assert "  seed: 7  # command line" in shown


@pytest.mark.parametrize(
    "command", ["train", "sft", "selftest", "config show", "config check --for sft", "plan --search"]
)
def test_every_command_reads_values_behind_options(command, capsys):
    assert main([*command.split(), "run.seed=7", "--config", QUICKSTART, "rollout.behind=1"]) == 2
    assert "unknown key 'rollout.behind'" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words", ["plan run.seed=7 --nods 3", "train --steps=3 run.seed=7", "status one two", "doctor run.seed=7"]
)
def test_what_no_command_takes_is_refused_before_work(words, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(words.split())
    assert "unrecognized arguments: " in capsys.readouterr().err


def test_show_names_the_preset(capsys, tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("algorithm:\n  preset: dapo\n  clip_ratio_low: 0.1\n")
    lines = config(capsys, "show", "--config", path).splitlines()
    assert "  clip_ratio_high: 0.28  # preset dapo" in lines
    assert f"  clip_ratio_low: 0.1  # {path}:3" in lines


def test_show_only_set_leaves_out_the_defaults(capsys):
    text = config(capsys, "show", "--config", QUICKSTART, "--only-set")
    assert "default" not in text
    assert yaml.safe_load(text) == yaml.safe_load(Path(QUICKSTART).read_text())


def test_show_without_a_file_names_what_has_no_value(capsys):
    assert "  path: '???'  # default; no value yet" in config(capsys, "show").splitlines()


@pytest.mark.slow_but(4)
@pytest.mark.parametrize(
    "text",
    [
        "a\nb",
        "#x: y",
        "",
        " ",
        "'",
        "null",
        "1",
        "true",
        "\\boxed{}",
        "é",
        "a: b",
        "@x",
        "%",
        "x" * 300,
        "1e-6",
        "[a]",
    ],
)
def test_text_of_every_kind_survives_show(text, capsys, tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text(yaml.safe_dump({"data": {"prompt_suffix": text}, "rollout": {"stop": [text, "a, b"]}}))
    shown = tmp_path / "shown.yaml"
    shown.write_text(config(capsys, "show", "--config", path))
    values = resolve(str(shown), []).values
    assert (values["data.prompt_suffix"], values["rollout.stop"]) == (text, [text, "a, b"])


@pytest.mark.parametrize(
    "value", [1e-6, 1e-10, 3.0, 1e22, 0.1, float("inf"), 5, True, None, [1, 2], [0.5], []]
)
def test_values_are_written_as_yaml_reads_them(value):
    read = yaml.safe_load(value_text(value))
    assert (read, type(read)) == (value, type(value))


# explain


def test_explain_a_key(capsys):
    text = config(capsys, "explain", "train.ppo_mini_batch_size")
    for part in (
        "prompts per optimizer step",
        "integer",
        "unit     prompts",
        "default  32",
        "greater than 0",
    ):
        assert part in text
    assert re.search(r"  data.train_batch_size +prompts per step", text)
    assert "  - Mini-batches share the prompts of a step evenly. (train only)\n" in text


def test_explain_names_the_choices(capsys):
    assert "one of recompute, rollout, current" in config(capsys, "explain", "train.old_logprobs")
    assert "token-mean, seq-mean-token-sum" in config(capsys, "explain", "algorithm.loss_agg_mode")
    assert "hashes, boxed" in config(capsys, "explain", "reward.answer_from")


def test_explain_a_section_lists_its_keys(capsys):
    text = config(capsys, "explain", "rollout.engine")
    for key in leaf_keys():
        assert (f"  {key} " in text) == (key.rpartition(".")[0] == "rollout.engine")


def test_explain_suggests_the_nearest_key(capsys):
    assert "did you mean 'rollout.temperature'" in config(capsys, "explain", "rollout.temprature", status=2)
    assert "did you mean 'algorithm.kl_loss_coef'" in config(capsys, "explain", "kl_loss_coef", status=2)


@pytest.mark.slow_but(20)
@pytest.mark.parametrize("key", list(known_keys()))
def test_every_key_can_be_explained(key, capsys):
    text = config(capsys, "explain", key)
    assert known_keys()[key].metadata["help"] in text


def test_help_texts_name_only_keys_that_exist():
    """Interactions between keys are also read from these texts, and would be lost for a key that is
    misnamed.
    """
    sections = "|".join(key for key in known_keys() if "." not in key)
    for key, field in known_keys().items():
        for name in re.findall(rf"(?<![\w./])(?:{sections})(?:\.[a-z]\w*)+", field.metadata["help"]):
            assert name in known_keys(), (key, name)


def test_interactions_go_both_ways():
    for key in leaf_keys():
        for other in interacting_keys(key):
            assert key in interacting_keys(other), (key, other)


def test_keys_interact_by_rules_and_by_help_texts():
    assert "data.train_batch_size" in interacting_keys("train.ppo_mini_batch_size")
    assert "optimizer.lr_min" in interacting_keys("optimizer.lr_schedule")  # named without its section
    assert "model.path" in interacting_keys("ref.path")
    assert "eval.n" not in interacting_keys("rollout.n")


def test_limits_and_choices_come_from_the_schema():
    assert limits("optimizer.lr") == "must be greater than 0"
    assert limits("optimizer.clip_grad") == "must not be negative"
    assert limits("optimizer.beta1") == "must be at least 0 and less than 1"
    assert limits("data.train_weights") == "each must be greater than 0"
    assert limits("run.name") == "must be the name of one folder, without a slash"
    assert limits("algorithm.entropy_coeff") == ""
    assert choices("rollout.engine.dtype") == ["auto", "float32", "bfloat16", "float16"]
    assert choices("train.old_logprobs") == ["recompute", "rollout", "current"]
    assert choices("algorithm.surrogate")[:3] == ["clip", "cispo", "reinforce"]
    assert choices("run.name") == []


def test_every_type_has_a_name_and_every_default_a_text():
    for key, field in known_keys().items():
        assert type_name(field), key
        if not dataclasses.is_dataclass(field.type):
            assert value_text(default_of(field)), key


# diff


def write(tmp_path, name, text):
    path = tmp_path / name
    path.write_text(text)
    return path


def test_diff_gives_both_values_and_origins(capsys, tmp_path):
    a = write(tmp_path, "a.yaml", "rollout: {n: 4}\ntrain:\n  old_logprobs: rollout\n")
    b = write(tmp_path, "b.yaml", "train: {packing: true}\n\nrollout:\n  temperature: 1.0\n  n: 16\n")
    text = config(capsys, "diff", a, b, status=1)
    assert text.splitlines() == [
        "rollout.n",
        f"  a 4   # {a}:1",
        f"  b 16  # {b}:5",
        "train.old_logprobs",
        f"  a rollout    # {a}:3",
        "  b recompute  # default",
    ]
    assert json.loads(config(capsys, "diff", a, b, "--json", status=1)) == {
        "rollout.n": {"a": {"value": 4, "origin": f"{a}:1"}, "b": {"value": 16, "origin": f"{b}:5"}},
        "train.old_logprobs": {
            "a": {"value": "rollout", "origin": f"{a}:3"},
            "b": {"value": "recompute", "origin": "default"},
        },
    }


def test_diff_of_equal_configurations(capsys, tmp_path):
    a = write(tmp_path, "a.yaml", "rollout: {n: 8}\n")
    b = write(tmp_path, "b.yaml", "")
    assert "same configuration" in config(capsys, "diff", a, b)
    assert json.loads(config(capsys, "diff", a, b, "--json")) == {}


@pytest.mark.slow
def test_diff_of_the_configurations_here_is_complete(capsys):
    for other in CONFIGS:
        found = json.loads(
            config(capsys, "diff", QUICKSTART, other, "--json", status=0 if other == QUICKSTART else 1)
        )
        a, b = resolve(QUICKSTART, []).values, resolve(other, []).values
        assert set(found) == {key for key in a if a[key] != b[key]}


# check


@pytest.fixture(scope="module")
def run_files(tmp_path_factory):
    """A model with a tokenizer, and data: everything that `check` can look at."""
    folder = tmp_path_factory.mktemp("files")
    subprocess.run(
        [sys.executable, "tools/make_tiny_model.py", folder / "model", "--hidden", "64", "--ffn", "128"],
        check=True,
    )
    rows = [{"prompt": "1+1=", "answer": "2"}, {"prompt": "2+2=", "answer": "4"}]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_check_lists_every_violation_and_what_it_could_not_look_at(capsys, tmp_path):
    path = write(
        tmp_path,
        "c.yaml",
        "model: {path: /nowhere/model}\ndata: {train: /nowhere/t.jsonl, eval: 'hf:some/set'}\n"
        "rolout: {n: 3}\ntrain: {packing: perhaps, ppo_mini_batch_size: 5}\noptimizer: {lr: -1}\n",
    )
    text = config(
        capsys,
        "check",
        "--config",
        path,
        "rollout.top_p=0.9",
        "rollout.n=four",
        "algorithm.nothing_like_it=1",
        status=2,
    )
    for part in (
        "'rolout'",
        "packing",
        "ppo_mini_batch_size=5 does not divide",
        "optimizer.lr",
        "rollout.top_p",
        "four",
        "nothing_like_it",
    ):
        assert part in text
    assert "7 violations" in text
    assert "not checked: model.path: /nowhere/model is not a folder here" in text
    assert "not checked: data.train: /nowhere/t.jsonl is not a file here" in text
    assert "not checked: data.eval: hf:some/set" in text


def test_check_passes_a_legal_configuration(capsys):
    for path in ("configs/quickstart.yaml", "configs/gsm8k_cpu.yaml"):
        text = config(capsys, "check", "--config", path, "model.path=/nowhere", "data.train=/nowhere.jsonl")
        assert "no violations" in text
        assert "checked: schema; rules across keys" in text
    assert "no violations" in config(
        capsys, "check", "--for", "sft", "--config", "configs/quickstart_sft.yaml"
    )


def test_check_names_missing_values(capsys):
    assert "no value for model.path" in config(
        capsys, "check", "--config", "configs/llama3_70b_16node.yaml", status=2
    )
    text = config(capsys, "check", "--for", "sft", "model.path=/nowhere", status=2)
    assert "no value for data.train" in text


def test_check_reads_the_reward_function(capsys, tmp_path):
    text = config(
        capsys, "check", "model.path=/m", "data.train=/d", "reward.function=no_such_module:f", status=2
    )
    assert "no_such_module" in text


def test_check_looks_into_model_and_data(capsys, run_files):
    files = [f"model.path={run_files}/model", f"data.train={run_files}/train.jsonl"]
    lengths = ["data.max_prompt_length=32", "rollout.max_response_length=32"]
    text = config(capsys, "check", *files, *lengths)
    assert f"model {run_files}/model" in text
    assert f"data.train {run_files}/train.jsonl" in text
    assert "not checked" not in text
    assert "positions" in config(capsys, "check", *files, "rollout.max_response_length=4096", status=2)
    assert "attention heads" in config(
        capsys, "check", *files, *lengths, "megatron.tensor_parallel=3", status=2
    )
    assert "max_prompt_length=2" in config(
        capsys, "check", *files, *lengths, "data.max_prompt_length=2", status=2
    )
    assert "'solution' is missing" in config(
        capsys, "check", *files, *lengths, "data.answer_key=solution", status=2
    )


def test_check_looks_into_data_without_a_model(capsys, run_files):
    files = ["model.path=/nowhere", f"data.train={run_files}/train.jsonl"]
    assert "fields of data.train" in config(capsys, "check", *files)
    assert "'question' is missing" in config(capsys, "check", *files, "data.prompt_key=question", status=2)
    assert "'response' is missing" in config(capsys, "check", "--for", "sft", *files, status=2)


def test_check_agrees_with_what_a_run_refuses():
    """`check` must not be laxer than `train`: the same settings give the same verdict."""
    from grpo_megatron.errors import UserError
    from grpo_megatron.preflight.check import check

    for overrides in (
        ["rollout.n=0"],
        ["megatron.sequence_parallel=true"],
        ["rollout.stop=3"],
        ["nope=1"],
        ["optimizer.eps=1e-9"],
    ):
        needed = ["model.path=/m", "data.train=/d", *overrides]
        try:
            load_config(None, needed)
            refused = False
        except UserError:
            refused = True
        assert bool(check(None, needed).violations) == refused, overrides


# docs


def test_docs_are_current():
    """It runs in a process of its own.

    Here, other tests have registered plug-ins, which the page would list.
    """
    made = subprocess.run(
        [sys.executable, "-m", "grpo_megatron.cli", "config", "docs"], capture_output=True, text=True
    )
    assert made.returncode == 0, made.stderr
    assert Path("docs/config.md").read_text(encoding="utf-8") == made.stdout, (
        f"docs/config.md is stale; run: {COMMAND}"
    )


def test_docs_have_every_key(capsys):
    text = config(capsys, "docs")
    for key in leaf_keys():
        assert f"| `{key}` |" in text
