"""Launch scripts that bash runs in the sandbox: what is recorded, and that no script does harm."""

import re
import time
from functools import partial

import pytest

from grpo_megatron.errors import UserError
from grpo_megatron.importers import launch_script, read_settings
from grpo_megatron.sandbox.run import Sandbox
from tests.sandboxes import processes
from tests.unit.test_import_branches import HEAD, read

# What a sandbox contains is tested by test_sandbox*.py in both ways.
pytestmark = pytest.mark.slow_when(lambda containment: containment == "landlock")

WORDS = "a.b=1 c.d=x"


@pytest.fixture(autouse=True)
def sandbox(containment, monkeypatch):
    monkeypatch.setattr(launch_script, "Sandbox", partial(Sandbox, containment=containment))


# programs, however they are called


@pytest.mark.parametrize(
    "command",
    [
        f"/usr/bin/python3 -m x {WORDS}",
        f'PYTHON="$CONDA_PREFIX/bin/python"\nDEBUG="a b" N=1 $PYTHON -m x {WORDS}',
        f"exec python3 -m x {WORDS}",
        f"nohup torchrun -m x {WORDS} > /data/logs/train.log 2>&1 &\nwait $!",
        f"set -euo pipefail\npython3 -m x {WORDS} 2>&1 | tee -a $HOME/log_$(date +%F).txt",
        f"export PATH=/usr/bin:$PATH\nuv run python -m x {WORDS}",
        f"ray job submit --address=$RAY -- python3 -m x {WORDS}",
        f"srun --nodes=2 bash -lc 'python3 -m x {WORDS}'",
        f"ssh node << EOF\nexport N=1\npython3 -m x {WORDS}\nEOF",
        f"cat > run.sh << 'EOF'\npython3 -m x {WORDS}\nEOF\nchmod +x run.sh\n./run.sh",
        f"f() {{ local n=$1; shift; python3 -m x a.b=$n $@; }}\nf {WORDS.replace('a.b=', '')}",
        f'CMD="python3 -m x {WORDS}"\necho $CMD > /logs/command\neval $CMD',
        f"until ray status; do sleep 5; done\npython3 -m x {WORDS}",
        f"P=80\nwhile netstat | grep -q :$P; do P=$((P + 1)); done\npython3 -m x {WORDS}",
        f"(python3 -m x {WORDS})\nwhile true; do sleep 60; done",
        f"ulimit -n 65535\ncd $(dirname $0)/..\npython3 -m x {WORDS}",
        f"ray stop || true\n[ -f /data/x ] || python3 prepare.py\ntime python3 -m x {WORDS}\nexit 1",
    ],
    ids=lambda command: command[:20],
)
def test_a_program_is_recorded_however_it_is_called(command):
    found = read_settings(command)
    assert (found.values, found.program, found.undecided) == ({"a.b": 1, "c.d": "x"}, "x", {})


def test_arrays_and_expansions_are_those_of_bash():
    found = read(
        "MODEL=/models/Qwen2.5-7B\nARGS=(a.a=1 'a.b=x y')\nARGS+=(a.c=${MODEL,,})\nARGS[0]=a.a=2\n"
        "declare -A SIZE=([7B]=8 [72B]=64)\nfor i in $(seq 2); do ARGS+=(b.n$i=$((i * 10))); done\n"
        f'{HEAD} "${{ARGS[@]}}" c.name=$(basename "${{MODEL,,}}") c.size=${{SIZE[7B]}} '
        "c.dir=$(dirname $MODEL) c.list=\"['$HOME/x','y']\" c.first=${ARGS[@]:0:1}"
    )
    assert found.values == {
        "a.a": 2,
        "a.b": "x y",
        "a.c": "/models/qwen2.5-7b",
        "b.n1": 10,
        "b.n2": 20,
        "c.name": "qwen2.5-7b",
        "c.size": 8,
        "c.dir": "/models",
        "c.list": ["$HOME/x", "y"],
        "c.first": "a.a=2",
    }
    assert not found.undecided


# what is not known is never a value


@pytest.mark.parametrize(
    ("setup", "word", "value"),
    [
        ("", "$(nproc)", "$(nproc)"),
        ("", "$(nvidia-smi -L | wc -l)", "$(nvidia-smi -L | wc -l)"),
        ("N=$(nproc)", "$((N * 2))", "$<unknown>"),
        ("N=$(nproc)", "$((1024 / N))", "$<unknown>"),
        ("N=$(hostname); N=${N:0:2}", "$N", "$<unknown>"),
        ("if [ $(nproc) -gt 8 ]; then N=1; else N=2; fi", "$N", "$<unknown>"),
        ("if nvidia-smi; then N=1; else N=2; fi", "$N", "$<1 or 2>"),
        ("D=${D:-$(python3 -c 'import x' && echo npu || echo gpu)}", '"$D"', "$<npu or gpu>"),
        ("if [[ -f /data/x ]]; then N=1; else N=2; fi", "$N", "$<2 or 1>"),
        ("", "$((NODES * 8))", "$<unknown>"),
        ("for ((i = 1; i < NODES; i++)); do ray start; done", "$NODES", "$NODES"),
        ("cd /x/$(whoami)", "$(pwd)/y", "$(cd /x/$(whoami) && pwd)/y"),
    ],
)
def test_what_a_script_takes_from_the_machine_is_not_known(setup, word, value):
    found = read(f"{setup}\n{HEAD} z.z=0 a.b={word}")
    assert found.values["a.b"] == value
    assert ("a.b" in found.undecided) == value.startswith("$<") or value == "$NODES"


def test_variables_that_are_not_set_are_reported_where_a_setting_uses_them():
    found = read(
        "set -u\nOUT=${OUT:-/out}\nMODEL=${MODEL:-$ROOT/model}\n"
        f"{HEAD} a.path=$DATA/x a.out=$OUT a.model=$MODEL a.n=${{N:-4}} a.x=${{EXTRA:-}} $MORE"
    )
    assert found.values == {
        "a.path": "$DATA/x",
        "a.out": "/out",
        "a.model": "$ROOT/model",
        "a.n": 4,
        "a.x": None,
    }
    assert found.unread == ["$MORE: not known here, and it may contain further settings"]
    given = read(f"{HEAD} a.path=$DATA/x a.n=$((N * 8)) $MORE", DATA="/d", N="2", MORE="b.c=3")
    assert (given.values, given.unread) == ({"a.path": "/d/x", "a.n": 16, "b.c": 3}, [])


def test_a_case_on_the_device_is_decided_by_its_default():
    script = (
        "DEVICE=${DEVICE:-gpu}\nARGS=(a.b=1)\n"
        'case "$DEVICE" in\n npu) ARGS+=(c.d=2 e.f=3) ;;\n gpu) ARGS+=(c.d=4) ;;\n *) exit 1 ;;\nesac\n'
        f'{HEAD} "${{ARGS[@]}}"'
    )
    found = read(script)
    assert (found.values, found.undecided) == ({"a.b": 1, "c.d": 4}, {})
    assert found.notes == ['$DEVICE: not set, but the script tests it: case "$DEVICE"']
    assert read(script, DEVICE="npu").values == {"a.b": 1, "c.d": 2, "e.f": 3}


def test_arguments_of_the_caller():
    script = (
        f'if [ -z "$1" ]; then NAME=small; else NAME=$1; fi\n{HEAD} --config-name $NAME a.b=$NAME "${{@:2}}"'
    )
    found = read(script)
    assert (found.values, found.base) == ({"a.b": "small"}, {"name": "small"})
    assert "$1: not set; with another value, these may differ: a.b" in found.notes
    assert "$@: further arguments of the script's caller" in found.notes
    needed = read(f'if [ $# -lt 2 ]; then echo usage; exit 1; fi\n{HEAD} a.b=$1 a.c=${{N:-3}} "${{@:3}}"')
    assert needed.values == {"a.b": "$1", "a.c": 3}


def test_a_script_that_waits_for_output_may_need_arguments_too():
    """The script waits for ever if programs print nothing, and was refused at the sandbox's limit."""
    found = read(
        'while [ -z "$(hostname -I)" ]; do :; done\n[ $# -lt 1 ] && exit\n' + f"{HEAD} z.z=0 a.b=$1 c.d=2"
    )
    assert found.values == {"z.z": 0, "a.b": "$1", "c.d": 2}


def test_other_scripts_and_missing_files_are_not_read():
    found = read(f"source ./env.sh\nmapfile -t X < words\n[ -f more.sh ] && . more.sh\n{HEAD} a.b=1")
    assert found.unread == [
        "source ./env.sh: another script, which was not read",
        "line 2: words: No such file or directory",
        "source more.sh: another script, which was not read; depends on [ -f more.sh ]",
    ]


# hostile scripts

FORK_BOMB = "f() { f | f; }\nf\n"


@pytest.mark.parametrize(
    ("attack", "reason"),
    [
        ("while :; do :; done", "cpu"),
        ("while :; do true & wait; done", "(cpu|time)"),
        (FORK_BOMB, "processes"),
        ("while :; do sleep_() { :; }; (sleep_ 1; while :; do :; done) & done", "processes"),
        ("while :; do printf '%1000000s' x; done", "output"),
        ("x=x; while :; do x=$x$x; done", "memory"),
        ("while :; do printf '%1000000s' x >> file; done", "(files|cpu)"),
    ],
)
def test_a_script_that_never_ends_or_takes_too_much_is_ended(attack, reason):
    before, start = processes(), time.monotonic()
    with pytest.raises(UserError) as error:
        read(f"{attack}\n{HEAD} a.b=1")
    assert re.search(rf"limit of the sandbox \({reason}\)", str(error.value))
    assert "--cfg job" in str(error.value)
    assert time.monotonic() - start < 60
    assert processes() == before


def test_a_script_does_no_harm(tmp_path):
    kept = tmp_path / "kept" / "file"
    kept.parent.mkdir()
    kept.write_text("here")
    found = read(
        f"unset -f command_not_found_handle kill exec cd command\ntrap - DEBUG\nPATH=/usr/bin:/bin\n"
        f"rm -rf {tmp_path} ~ /; /bin/rm -rf {tmp_path}; echo x > {kept}; : > {tmp_path}/new\n"
        f"N=$(cat {kept}; cat /etc/passwd /proc/1/environ | head -c 1)\n"
        "kill -9 -1; kill -9 $PPID; /usr/bin/setsid true && N+=setsid\n"
        "exec 3<> /dev/tcp/127.0.0.1/22 && N+=network\n"
        f"python3 -m x z.z=0 a.b=$N\n"
        "printf '%s\\0' '8 line x' '9 text' '7 word python3' '7 word z.z=0' \"7 word a.b=$N\" >&50\n"
    )
    assert found.values == {"z.z": 0, "a.b": None}
    assert kept.read_text() == "here"
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


def test_the_environment_of_this_process_is_not_passed_on(monkeypatch):
    monkeypatch.setenv("SECRET_TOKEN", "hush")
    assert read(f"{HEAD} a.b=$SECRET_TOKEN c.d=$(printenv)").values == {
        "a.b": "$SECRET_TOKEN",
        "c.d": "$(printenv)",
    }


# where bash or the sandbox is missing


def test_without_bash_or_a_sandbox_hydras_own_output_is_named(monkeypatch):
    def refuse(limits):
        raise UserError("no namespaces")

    monkeypatch.setattr(launch_script, "Sandbox", refuse)
    with pytest.raises(UserError, match=r"\.hydra/overrides\.yaml .* --cfg job.*no namespaces"):
        read(f"{HEAD} a.b=1")
    monkeypatch.setattr(launch_script.shutil, "which", lambda name: None)
    with pytest.raises(UserError, match=r"bash, which is not installed.*\.hydra/overrides\.yaml"):
        read(f"{HEAD} a.b=1")
