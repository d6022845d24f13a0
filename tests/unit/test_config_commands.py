"""`grpo-megatron config show`, `explain`, `diff` and `docs` through the command line, on real files.

test_config_check.py tests `check`.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from grpo_megatron.cli import main
from grpo_megatron.config.keys import (
    choices_of,
    default_of,
    is_internal,
    is_section,
    known_keys,
    type_name,
    value_text,
)
from grpo_megatron.config.load import plain, read_config, resolve
from grpo_megatron.preflight.docs import COMMAND, type_with_limits
from grpo_megatron.preflight.keys import choices, interacting_keys
from tests.unit.config_files import config, write

QUICKSTART = "configs/quickstart.yaml"
CONFIGS = sorted(map(str, Path("configs").glob("*.yaml")))


def leaf_keys():
    return [key for key, field in known_keys().items() if not is_section(field)]


# show


@pytest.mark.slow_but(3)
@pytest.mark.parametrize("path", CONFIGS)
def test_what_show_prints_loads_to_the_same_configuration(path, capsys, tmp_path):
    for flags in ([], ["--only-set"]):
        shown = tmp_path / "shown.yaml"
        shown.write_text(config(capsys, "show", "--config", path, *flags, "rollout.n=3"))
        assert resolve(str(shown), []).values == resolve(path, ["rollout.n=3"]).values


def test_every_choice_loads_again_from_a_runs_configuration(tmp_path):
    """`continue` used to be written as the name of its constant, go_on, which no run accepts."""
    saved, needed = tmp_path / "config.yaml", ["model.path=m", "data.train=d.jsonl"]
    keys = {key: choices_of(field.annotation) for key, field in known_keys().items()}
    keys = {key: values for key, values in keys.items() if type_name(known_keys()[key]).startswith("one of")}
    for number in range(max(map(len, keys.values()))):
        chosen = [f"{key}={values[number % len(values)]}" for key, values in keys.items()]
        config = read_config(None, [*needed, *chosen])
        saved.write_text(yaml.safe_dump(plain(config)))
        assert read_config(str(saved), []) == config


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
        "?</search>",
        "<|im_end|>",
        "-",
        "a:",
        "*x",
        "&x",
        "!x",
        "# x",
    ],
)
def test_text_of_every_kind_survives_show(text, capsys, tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text(
        yaml.safe_dump({"data": {"prompt_suffix": text}, "rollout": {"stop": [text or "x", "a, b"]}})
    )
    shown = tmp_path / "shown.yaml"
    shown.write_text(config(capsys, "show", "--config", path))
    values = resolve(str(shown), []).values
    assert (values["data.prompt_suffix"], values["rollout.stop"]) == (text, [text or "x", "a, b"])


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
        "Number of prompts per optimizer step",
        "type     integer > 0\n",
        "unit     prompts",
        "default  32",
    ):
        assert part in text
    assert re.search(r"  data.train_batch_size +Number of prompts per step", text)
    assert "  - train.ppo_mini_batch_size must divide data.train_batch_size. (train only)\n" in text


def test_explain_names_the_choices(capsys):
    assert "`recompute`, `rollout`, `current`" in config(capsys, "explain", "train.old_logprobs")
    assert "`wait`, `continue`, `keep`" in config(capsys, "explain", "rollout.on_update")
    assert "`token-mean`, `seq-mean-token-sum`" in config(capsys, "explain", "algorithm.loss_agg_mode")
    assert "list of `hashes`, `boxed`" in config(capsys, "explain", "reward.answer_from")


def test_explain_a_section_lists_its_keys(capsys):
    text = config(capsys, "explain", "rollout.engine")
    for key in leaf_keys():
        assert (f"  {key} " in text) == (key.rpartition(".")[0] == "rollout.engine")


def test_explain_suggests_the_nearest_key(capsys):
    assert "did you mean 'rollout.temperature'" in config(capsys, "explain", "rollout.temprature", status=2)
    assert "did you mean 'algorithm.kl_loss_coef'" in config(capsys, "explain", "kl_loss_coef", status=2)
    assert "is now called ref.path" in config(capsys, "explain", "model.reference_path", status=2)


@pytest.mark.slow_but(20)
@pytest.mark.parametrize("key", list(known_keys()))
def test_every_key_can_be_explained(key, capsys):
    text = config(capsys, "explain", key)
    assert known_keys()[key].description in text


def test_help_texts_name_only_keys_that_exist():
    """Interactions between keys are also read from these texts, and would be lost for a key that is
    misnamed.
    """
    sections = "|".join(key for key in known_keys() if "." not in key)
    for key, field in known_keys().items():
        for name in re.findall(rf"(?<![\w./])(?:{sections})(?:\.[a-z]\w*)+", field.description):
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
    assert type_with_limits("optimizer.lr") == "number > 0"
    assert type_with_limits("optimizer.clip_grad") == "number >= 0"
    assert type_with_limits("optimizer.beta1") == "number >= 0, < 1"
    assert type_with_limits("data.train_weights") == "list of number > 0"
    assert type_with_limits("run.name") == "folder name"
    assert type_with_limits("algorithm.entropy_coeff") == "number"
    assert choices("rollout.engine.dtype") == ["auto", "float32", "bfloat16", "float16"]
    assert choices("train.old_logprobs") == ["recompute", "rollout", "current"]
    assert choices("algorithm.surrogate")[:3] == ["clip", "cispo", "reinforce"]
    assert choices("run.name") == []


def test_every_type_has_a_name_and_every_default_a_text():
    for key, field in known_keys().items():
        assert type_name(field), key
        if not is_section(field):
            assert value_text(default_of(field)), key


# diff


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


def test_an_internal_key_can_be_set_and_explained_and_is_in_no_list(capsys):
    key = "megatron.emulate_kernels"
    assert [name for name, field in known_keys().items() if is_internal(field)] == [key]
    assert resolve(None, [f"{key}=true"]).values[key] is True
    assert f"{key}\n  Emulate TransformerEngine's kernels" in config(capsys, "explain", key)
    assert key not in config(capsys, "explain", "megatron")


def test_docs_have_every_key_but_the_internal_ones(capsys):
    text = config(capsys, "docs")
    for key in leaf_keys():
        assert bool(re.search(rf"(?m)^- `{key}[=`]", text)) != is_internal(known_keys()[key])


@pytest.mark.parametrize(
    ("entry", "about"),
    [
        ("data.shuffle=true", ""),
        ("rollout.n=8", ""),
        ("rollout.top_k=-1", ">= -1"),
        ("optimizer.beta1=0.9", ">= 0, < 1"),
        ("rollout.beam.length_penalty=1.0", "-10 to 10"),
        ("eval.max_response_length=null", "tokens, integer"),
        ("optimizer.lr=1.0e-06", ""),
        ("algorithm.clip_ratio_c=null", "number > 1"),
        ("algorithm.entropy_coeff=0.0", "any number"),
        ("run.total_steps=100", ""),
        ("run.grace=60.0", "seconds, >= 0"),
        ("data.train=null", "text, list"),
        ("data.train_weights=[]", "list of number"),
        ("data.tools_key=tools", "or null"),
        ("reward.args={}", ""),
        ("run.name=run", "folder name"),
        ("ref.path=null", "path"),
        ("model.path", "must be set, path"),
        ("reward.extract=null", "regular expression"),
        ("megatron.cpu_threads=auto", "`auto`, or 1 to 1024"),
        # The first two are explained in the description, the third is not.
        ("train.old_logprobs=recompute", ""),
        ("megatron.recompute=none", ""),
        ("rollout.engine.dtype=auto", "`auto`, `float32`, `bfloat16`, `float16`"),
        ("monitor.listeners=[]", "list of `wandb`, `prometheus`"),
    ],
)
def test_docs_leave_out_what_the_default_and_the_description_show(entry, about, capsys):
    start = f"- `{entry}`{f' ({about})' if about else ''}: "
    assert any(line.startswith(start) for line in config(capsys, "docs").splitlines())
