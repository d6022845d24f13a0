"""Launch scripts whose branches depend on the machine, and what is read from them."""

from functools import partial

import pytest
import yaml

from grpo_megatron.errors import UserError
from grpo_megatron.importers import VERL, import_settings, read_settings, to_yaml
from grpo_megatron.preflight.check import load_config
from tests.tools import run_tool

HEAD = "python3 -m verl.trainer.main_ppo "
# A condition that only a machine can answer, as the scripts of verl have it.
DEVICE = "DEVICE=${DEVICE:-$(python3 -c 'import torch_npu' && echo npu || echo gpu)}\n"
SCRIPT = (
    DEVICE
    + """
ACTOR=(
    algorithm.adv_estimator=grpo
    actor_rollout_ref.actor.optim.lr=3e-6
    actor_rollout_ref.actor.use_kl_loss=True
    actor_rollout_ref.actor.kl_loss_coef=0.002
)
ROLLOUT=(actor_rollout_ref.rollout.n=16 actor_rollout_ref.model.path=/m data.train_files=/d.parquet)
EXTRA=()
case "${DEVICE}" in
    gpu) batch=256 ;;
    npu) batch=16
         ACTOR+=(actor_rollout_ref.actor.kl_loss_coef=0.01)
         ROLLOUT+=(actor_rollout_ref.rollout.temperature=0.7)
         EXTRA+=(+my.key=1) ;;
    *) echo "unsupported" >&2; exit 1 ;;
esac
python3 -m verl.trainer.main_ppo "${ACTOR[@]}" "${ROLLOUT[@]}" data.train_batch_size=$batch "${EXTRA[@]}" "$@"
"""
)


def read(script, **environment):
    return read_settings(script, environment=environment)


def verl(script, given=None, **environment):
    return import_settings(VERL, read(script, **environment), given or {})


# whole scripts


def test_arrays_that_a_branch_changes_keep_what_all_branches_have():
    """The whole array used to be lost and replaced by defaults, and no exit status said so."""
    result = verl(SCRIPT)
    assert result.values["rollout.n"] == 16
    assert result.values["optimizer.lr"] == 3e-6
    assert result.values["algorithm.use_kl_loss"] is True
    assert result.values["model.path"] == "/m"
    for key in ("algorithm.kl_loss_coef", "rollout.temperature", "data.train_batch_size"):
        assert key not in result.values
    text = result.report()
    reason = "depends on whether python3 -c import torch_npu succeeds"
    assert f"kl_loss_coef=$<0.01 or 0.002>: {reason}; set it by hand (algorithm.kl_loss_coef)" in text
    assert f"temperature=$<0.7 or not set>: {reason}" in text
    assert f"data.train_batch_size=$<16 or 256>: {reason}" in text
    assert "my.key=$<1 or not set>" in text
    assert result.needs_acceptance


def test_a_variable_that_is_given_decides_the_branches():
    gpu, npu = read(SCRIPT, DEVICE="gpu"), read(SCRIPT, DEVICE="npu")
    assert (gpu.undecided, gpu.unread, npu.undecided, npu.unread) == ({}, [], {}, [])
    assert gpu.values["actor_rollout_ref.actor.kl_loss_coef"] == 0.002
    assert npu.values["actor_rollout_ref.actor.kl_loss_coef"] == 0.01
    assert (gpu.values["data.train_batch_size"], npu.values["data.train_batch_size"]) == (256, 16)
    assert "my.key" not in gpu.values
    with pytest.raises(UserError, match="neither"):
        read(SCRIPT, DEVICE="other")  # the script ends before it launches anything


def test_keys_that_are_given_settle_what_branches_leave_open():
    given = {
        "algorithm.kl_loss_coef": 0.002,
        "rollout.temperature": 1.0,
        "data.train_batch_size": 256,
        "reward.function": "math",
    }
    result = verl(
        SCRIPT.replace("+my.key=1", "actor_rollout_ref.rollout.temperature=0.9"),
        given | {"run.total_steps": 9},
    )
    assert (result.changes_training, result.unread, result.unknown) == ([], [], [])
    assert not result.needs_acceptance


def test_nothing_is_written_of_what_was_not_read_without_acceptance(tmp_path):
    """16 of verl's scripts used to give a file of defaults, with status 0."""
    out = tmp_path / "ours.yaml"
    tool = partial(run_tool, "import_config")
    overrides = ["reward.function=math", "run.total_steps=9"]
    _, report = tool("-", "--from", "verl", *overrides, "--out", out, stdin=SCRIPT, status=2)
    assert not out.exists()
    assert "--env NAME=VALUE" in report
    tool("-", "--env", "DEVICE=gpu", "--from", "verl", *overrides, "--out", out, stdin=SCRIPT, status=0)
    assert yaml.safe_load(out.read_text())["algorithm"]["kl_loss_coef"] == 0.002
    _, report = tool("-", "--env", "DEVICE", stdin=SCRIPT, status=2)
    assert "--env DEVICE must have the form NAME=VALUE" in report


# parts of scripts: what is known, what is open, what is not read


FILE = "[ -d /data ]"


@pytest.mark.parametrize(
    ("script", "values", "unread"),
    [
        # Arrays, changed in different forms of branches.
        (f"X=(a.b=1)\nif {FILE}; then X+=(c.d=2); fi", {"a.b": 1, "c.d": "$<not set or 2>"}, []),
        (f"X=(a.b=1)\n{FILE} && X+=(c.d=2)", {"a.b": 1, "c.d": "$<not set or 2>"}, []),
        (f"if {FILE}; then X=(a.b=1 c.d=2); else X=(a.b=1 c.d=3); fi", {"a.b": 1, "c.d": "$<3 or 2>"}, []),
        (f"X=(a.b=1 c.d=2)\nif {FILE}; then X=(c.d=2); fi", {"a.b": "$<1 or not set>", "c.d": 2}, []),
        (f"X=(a.b=1)\nif {FILE}; then X+=(a.b=2); fi\nX+=(a.b=3)", {"a.b": 3}, []),
        (f"X=(a.b=1)\nif {FILE}; then exit 1; fi\nX+=(c.d=2)", {"a.b": 1, "c.d": 2}, []),
        ("X=(a.b=1)\ncase $D in g) X+=(c.d=2);; *) X+=(c.d=3);; esac", {"a.b": 1, "c.d": 3}, []),
        ("X=(a.b=1)\ncase x in x) X+=(c.d=2);& y) X+=(e.f=3);; esac", {"a.b": 1, "c.d": 2, "e.f": 3}, []),
        # Text that is made of settings.
        (f'X="a.b=1"\nif {FILE}; then X="$X c.d=2"; fi', {"a.b": 1, "c.d": "$<not set or 2>"}, []),
        # What nobody knows is named.
        (f"X=(a.b=1)\nif {FILE}; then X+=(~c.d); fi", {"a.b": 1}, ["~c.d: depends on [ -d /data ]"]),
        ("X=(a.b=1 $MORE)", {"a.b": 1}, ["$MORE: not known here, and it may contain further settings"]),
        (
            "X=(a.b=1)\nX+=($(more))",
            {"a.b": 1},
            ["$(more): not known here, and it may contain further settings"],
        ),
        # Where a variable holds, and where not.
        ("N=1\nN=2 python3 other.py\nX=(a.b=$N)", {"a.b": 1}, []),
        ("N=1\n(N=2; cd /)\nX=(a.b=$N)", {"a.b": 1}, []),
        ("N=1\necho 2 | read N\nX=(a.b=$N)", {"a.b": 1}, []),
        ("N=1\nprintf -v N '%d' 3\nX=(a.b=$N)", {"a.b": 3}, []),
        ("N=1\neval N=2\nX=(a.b=$N)", {"a.b": 2}, []),
        ("set -- a.b=1 c.d=2\nX=($1)", {"a.b": 1}, []),
    ],
)
def test_what_a_script_leaves_open_is_said(script, values, unread):
    words = "$X" if 'X="' in script else '"${X[@]}"'
    found = read(f"{script}\n{HEAD} z.z=0 {words}\n")
    assert found.values == {"z.z": 0} | values
    assert found.unread == unread
    assert {key for key, value in values.items() if "$<" in str(value)} == set(found.undecided)


def test_a_script_of_another_is_not_the_program_itself():
    result = verl(
        f"bash run_common.sh {' '.join(('algorithm.adv_estimator=grpo', 'actor_rollout_ref.rollout.n=8'))}"
    )
    assert any(
        "run_common.sh: a different program from verl's main_ppo" in line for line in result.changes_training
    )


# what is written can be loaded


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ('$(basename "${X,,}")', None),
        ('"$(basename "${MODEL_PATH,,}")-minimal"', None),
        ("${EXP:-qwen_$(date +%Y%m%d)}", None),
        ('"a/${B:-c}"', "a-c"),
        ("..", None),
        ("'???'", None),
        ("'${oc.env:USER}'", None),
        ('"a b"', "a b"),
        ("gsm8k-7b", "gsm8k-7b"),
    ],
)
def test_the_name_of_a_run_gives_a_file_that_can_be_loaded(name, expected, tmp_path):
    """A name such as $(basename "${X,,}") used to be written unchanged, and was read as a reference
    without an end.
    """
    result = verl(SCRIPT.replace('"$@"', f"trainer.experiment_name={name}"), DEVICE="gpu")
    path = tmp_path / "ours.yaml"
    path.write_text(to_yaml(result))
    load_config(str(path), [])
    assert result.values.get("run.name") == expected
    assert expected or any(line.startswith("trainer.experiment_name=") for line in result.not_carried)


@pytest.mark.parametrize("key", ["actor_rollout_ref.model.path", "data.train_files", "data.prompt_key"])
@pytest.mark.parametrize(
    "text", ["${A", "$(x ${A[@]:1} y)", "???", "$HOME/${A,,}/x", "a: b", "- a", '"${A}${"', "${a.b}"]
)
def test_any_text_gives_a_file_that_can_be_loaded(key, text, tmp_path):
    result = verl(SCRIPT.replace('"$@"', f"{key}='{text}'"), DEVICE="gpu")
    path = tmp_path / "ours.yaml"
    path.write_text(to_yaml(result))
    load_config(
        str(path), [f"{ours}=/x" for ours in ("model.path", "data.train") if ours not in result.values]
    )
