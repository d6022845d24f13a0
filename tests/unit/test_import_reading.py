"""Launch scripts and YAML files of other systems: what is read from them, and what is refused."""

import contextlib
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_megatron.errors import UserError
from grpo_megatron.importers import (
    RLINF,
    SYSTEMS,
    Settings,
    import_settings,
    read_hydra_folder,
    read_settings,
)
from grpo_megatron.importers.mapping import CannotCarry, Source
from grpo_megatron.importers.typed import typed

HEAD = "python3 -m verl.trainer.main_ppo "


def value_of(word, setup=""):
    """Return the value of a.b in a script that launches with the word a.b=..., as written."""
    return read_settings(f"{setup}\n{HEAD} a.b={word}\n").values["a.b"]


@pytest.mark.parametrize(
    "text",
    ["", "hello", "- 1\n- 2", "set -x\nexport A=b\n", "it's", "\x00\x01", "if true; then", "a: [", "$(("],
)
def test_a_text_that_is_neither_is_refused(text):
    with pytest.raises(UserError, match=r"neither .*; only configurations of verl and RLinf can be imported"):
        read_settings(text)


@pytest.mark.slow_but(3)
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- 1", "list"),
        ("", "NoneType"),
        ("a: [", "not valid YAML"),
        ("a: &x [*x]", "YAML"),
        ("a: " + "[" * 3000, "YAML"),
        ("{~: 1}", "YAML"),
    ],
)
def test_a_yaml_file_that_has_no_sections_is_refused(text, message):
    with pytest.raises(UserError, match=message):
        read_settings(text, is_yaml=True)


def test_a_file_of_which_most_keys_are_unknown_is_none_of_theirs():
    """A file of an unknown system used to be taken for RLinf's, because it has a section `data` too."""
    read = read_settings("generation: {temperature: 1, top_p: 1, n: 4}\ndata: {shuffle: true}\n")
    with pytest.raises(
        UserError, match="only 1 of 4 keys are RLinf keys; give a complete RLinf configuration"
    ):
        import_settings(RLINF, read)


def test_a_date_and_a_broken_reference_in_yaml_stay_text():
    values = read_settings("a:\n  day: 2026-01-02\n  path: ${nowhere.x}/y\n", is_yaml=True).values
    assert values == {"a.day": "2026-01-02", "a.path": "$<nowhere.x>/y"}


def test_words_of_a_command_are_read_as_a_shell_reads_them():
    text = """
A=3; B=unused
N=5
python3 train.py a.b="x y" 'c.d=[1, 2]' ++e.f=$N +g.h=${M:-7} i.j=${UNSET} k.l=1e-3 m.n=True o.p= \
q.r=$((N * (N - 1) / 2)) \\
   s.t=$((N * UNKNOWN)) ~u.v # w.x=1
"""
    settings = read_settings(text)
    assert settings.values == {
        "a.b": "x y",
        "c.d": [1, 2],
        "e.f": 5,
        "g.h": 7,
        "i.j": "$UNSET",
        "k.l": 1e-3,
        "m.n": True,
        "o.p": None,
        "q.r": 10,
        "s.t": "$<unknown>",
    }
    assert settings.unread == ["~u.v: removes a key of the original configuration"]


@pytest.mark.parametrize(
    ("word", "setup", "expected"),
    [
        ("\"['$HOME/a.parquet','$HOME/b.parquet']\"", "", ["$HOME/a.parquet", "$HOME/b.parquet"]),
        ('"$files"', "a=$HOME/x\nfiles=\"['$a','y']\"", ["$HOME/x", "y"]),
        ("'[a,b]'", "", ["a", "b"]),
        ("'{x:1, y: [2]}'", "", {"x": 1, "y": [2]}),
        ("[1,null,True]", "", [1, None, True]),
        ("null", "", None),
        ("None", "", None),
        ("1_000", "", 1000),
        ('"1e-6"', "", 1e-6),
        ("\"'1'\"", "", "1"),
        ("~/data/x.parquet", "", "~/data/x.parquet"),
        ("$A", "A=~/data/x.parquet", "$HOME/data/x.parquet"),
        ("$A", "A='~/x'", "~/x"),
        ("$A", "A=${B:-~/x}", "$HOME/x"),
        ("$A", 'A="${B:-~/x}"', "~/x"),
        ('${A:-"${HOME}/x"}', "", "$HOME/x"),
        ("${A:-${B:-c}}", "", "c"),
        ("$A", ': "${A:=7}"', 7),
        ("${A:?say it}", "", "$A"),
        ("${A##*/}", "A=/a/b.c", "b.c"),
        ("${A##*/}", "A=$HOME/b.c", "b.c"),
        ("${A##*/}", "A=$HOME", "$HOME"),
        ("${A%.*}", "A=b.c.d", "b.c"),
        ("${A//a/x}", "A=banana", "bxnxnx"),
        ("${A:1:2}", "A=wxyz", "xy"),
        ("${A^^}", "A=abc", "ABC"),
        ("${#A[@]}", "A=(1 2 3)", 3),
        ("${A[1]}", "A=(1 2 3)", 2),
        ("x-$(date +%Y)-y", "", "x-$(date +%Y)-y"),
        ("$N", "if [ 3 -gt 2 ]; then N=4; else N=5; fi", 4),
        ("$N", 'case "$MODE" in a) N=4;; *) N=5;; esac', 5),
        ("$N", 'MODE=a; case "$MODE" in a) N=4;; *) N=5;; esac', 4),
        ("$N", "N=1; [[ $N == 1 && -n x ]] && N=2", 2),
        ("$N", "N=2\ncat > run.py <<'EOF'\nN=9 it's a.b=3\nEOF", 2),
        ("$N", "f() { N=$1; }\nf 6", 6),
    ],
)
def test_a_value_is_what_the_script_says(word, setup, expected):
    assert value_of(word, setup) == expected


def test_arrays_functions_and_pipelines_reach_the_command():
    text = """
COMMON=(
    a.b=1   # with a comment
    "c.d=x y"
)
COMMON+=(e.f=$N)
run() { local extra=$1; shift; python3 -m verl.trainer.main_ppo "${COMMON[@]}" g.h="$extra" $MORE "$@" 2>&1 \
| tee log; }
MORE="i.j=2 k.l=3"
run 5 m.n=6
"""
    settings = read_settings(text)
    assert settings.values == {"a.b": 1, "c.d": "x y", "e.f": "$N", "g.h": 5, "i.j": 2, "k.l": 3, "m.n": 6}
    assert settings.program == "verl.trainer.main_ppo"


def test_a_branch_is_decided_by_bash_and_what_it_asks_for_is_noted():
    settings = read_settings(f'if [ "$BIG" = 1 ]; then N=8; else N=4; fi\n{HEAD} a.b=$N $UNKNOWN_WORDS\n')
    assert settings.values == {"a.b": 4}
    assert settings.notes == ['$BIG: not set, but the script tests it: if [ "$BIG" = 1 ]']
    assert settings.unread == ["$UNKNOWN_WORDS: not known here, and it may contain further settings"]


def test_of_several_different_launches_one_must_be_named():
    script = f"{HEAD} a.b=1\n{HEAD} a.b=2\n"
    with pytest.raises(UserError, match=r"--launch NUMBER: 1 in line 1 .*; 2 in line 2"):
        read_settings(script)
    assert read_settings(script, launch=2).values == {"a.b": 2}
    with pytest.raises(UserError, match="2 launch commands"):
        read_settings(script, launch=3)
    assert read_settings(f"{HEAD} a.b=1\n{HEAD} a.b=1\n").values == {"a.b": 1}


def test_settings_after_a_missing_backslash_are_told():
    assert "line 2" in read_settings(f"{HEAD} a.b=1\n   +c.d=2 e.f=3\n").lost[0]


def test_what_hydra_itself_has_written_is_read(tmp_path):
    folder = Path(__file__).parent / "data" / "hydra_run"
    for found in (read_hydra_folder(folder), read_hydra_folder(folder / ".hydra")):
        assert found.values == {
            "algorithm.adv_estimator": "grpo",
            "data.train_files": ["/data/gsm8k/train.parquet", "/data/math/train.parquet"],
            "actor_rollout_ref.model.path": "/models/qwen",
            "actor_rollout_ref.actor.megatron.router_replay.mode": "R3",
            "actor_rollout_ref.rollout.n": 8,
            "trainer.experiment_name": None,
        }
        assert found.unread == ["~trainer.device: removes a key of the original configuration"]
        assert (found.program, found.base) == ("main_ppo", {"name": "ppo_megatron_trainer"})
    assert import_settings(SYSTEMS["verl"], found).values["moe.routing_replay"] == "engine"
    assert read_settings((folder / ".hydra" / "overrides.yaml").read_text()).values == found.values
    with pytest.raises(UserError, match=r"contains no \.hydra/overrides\.yaml"):
        read_hydra_folder(tmp_path)


def test_what_cfg_job_prints_is_read():
    printed = "actor_rollout_ref:\n  actor:\n    megatron:\n      router_replay:\n        mode: R3\n"
    found = read_settings(printed + "  rollout:\n    n: 8\nalgorithm:\n  adv_estimator: grpo\n")
    assert import_settings(SYSTEMS["verl"], found).values["moe.routing_replay"] == "engine"


def test_verl_settings_as_yaml():
    tree = {
        "algorithm": {"adv_estimator": "grpo"},
        "data": {
            "train_files": "/d.parquet",
            "max_prompt_length": 100,
            "max_response_length": "${data.max_prompt_length}",
        },
        "actor_rollout_ref": {
            "model": {"path": "/m"},
            "rollout": {"n": 4, "response_length": "${oc.select:data.x,7}"},
        },
    }
    values = import_settings(SYSTEMS["verl"], read_settings(yaml.safe_dump(tree))).values
    assert (values["rollout.n"], values["rollout.max_response_length"]) == (4, 100)


# no traceback, whatever the input


_JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-5, 10**20),
    st.floats(),
    st.text(max_size=6),
    st.sampled_from(["'1'", "1e-6", "1_000", "None", "null", "$X", "$(x)", "[1", "0", "inf"]),
    st.lists(st.one_of(st.integers(), st.text(max_size=3)), max_size=3),
    st.dictionaries(st.text(max_size=2), st.integers(), max_size=2),
    st.just([{"path": "x"}]),
)


@pytest.mark.slow
@pytest.mark.parametrize("name", SYSTEMS)
@settings(max_examples=30, deadline=None)
@given(st.data())
def test_any_value_of_any_key_is_carried_with_our_type_or_left_with_a_reason(name, data):
    keys = [
        entry.theirs.replace("*", "other")
        for entry in SYSTEMS[name].entries
        if entry.theirs != "runner.task_type"
    ]
    chosen = data.draw(st.lists(st.sampled_from(keys), min_size=1, max_size=8, unique=True))
    values = {key: data.draw(_JUNK, label=key) for key in chosen}
    result = import_settings(SYSTEMS[name], Settings(values))
    assert all(typed(key, value) == value for key, value in result.values.items())
    result.report()


_PIECES = [
    "a.b=",
    "$A",
    "${A",
    "}",
    "$(",
    ")",
    "'",
    '"',
    "\\",
    "if",
    "then",
    "fi",
    ";",
    "(",
    "<<E",
    "E",
    "x",
    "${A:-",
    "#",
    "[[",
    "{",
]


@settings(max_examples=10, deadline=None)
@given(st.lists(st.sampled_from([*_PIECES, " ", "\n"]), max_size=12).map("".join))
def test_any_script_is_read_or_refused(text):
    with contextlib.suppress(UserError):
        read_settings(text)


def test_a_source_says_what_is_no_number():
    source = Source({"a": "x", "b": "'", "c": 0, "d": float("nan")}, ())
    for key in ("a", "b", "d", "none"):
        with pytest.raises(CannotCarry):
            source.number(key)
    with pytest.raises(CannotCarry, match="at least 1"):
        source.count("c")
