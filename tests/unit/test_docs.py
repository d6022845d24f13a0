"""Every command in README.md, docs/ and the heads of configurations and scripts is run, here or by another
test.

The exceptions are listed.
"""

import ast
import json
import os
import re
import subprocess
import time
from pathlib import Path

import pytest
import submit
import yaml

from grpo_megatron.cli import main
from grpo_megatron.config.load import plain
from grpo_megatron.config.schema import Config
from grpo_megatron.monitoring.run_files import TEXTS
from grpo_megatron.monitoring.status import STATUS
from tests.documents import HEADS, PAGES, ROOT, Command, arguments, blocks, commands
from tests.tools import run_tool
from tests.unit.documented_commands import BEGINNINGS, COMMANDS, ByTest, Needs, Run
from tests.unit.ledger_steps import continued_run
from tests.unit.shown_runs import Talk

# Such as `grpo-megatron plan --search` in a sentence, which says what to use and not how.
NAME_ALONE = re.compile(r"(grpo-megatron( [a-z][a-z-]*)*|python [\w/]+\.py)((?: --[a-z-]+)*)")
FOUND: dict[str, list[Command]] = {}
for _path in [*PAGES, *HEADS]:
    for _command in commands(_path):
        FOUND.setdefault(_command.text, []).append(_command)


def beginning_of(command: str) -> str | None:
    """Return the longest of BEGINNINGS that the command starts with.

    The program's name alone does not count.
    """
    fitting = [one for one in BEGINNINGS if one == command or (" " in one and command.startswith(f"{one} "))]
    return max(fitting, key=len, default=None)


def row_of(command: str) -> Run | ByTest | Needs | None:
    return COMMANDS.get(command) or BEGINNINGS.get(beginning_of(command))


def of_kind(kind: type) -> list[str]:
    return sorted(command for command in FOUND if isinstance(row_of(command), kind))


def test_every_command_is_accounted_for():
    missing = {
        command: [found.place for found in FOUND[command]] for command in FOUND if row_of(command) is None
    }
    assert not missing, (
        "these commands have no row in tests/unit/documented_commands.py; give each one: Run to run it "
        "here, ByTest to name the test that runs it, Needs where none can"
    )


def test_every_row_is_of_a_command():
    begun = {beginning_of(command) for command in FOUND if command not in COMMANDS}
    stale = [row for row in (*COMMANDS, *BEGINNINGS) if row not in FOUND and row not in begun]
    assert not stale, (
        "no document gives these commands any more; take their rows out of tests/unit/documented_commands.py"
    )


def test_output_that_is_shown_is_compared():
    unread = [
        found.place
        for command in FOUND
        for found in FOUND[command]
        if found.output and not isinstance(row_of(command), Run)
    ]
    assert not unread, (
        "after `$ ` a page shows what a command prints, and no test compares it: give the command a row Run"
    )


SHAPES = """# A page

Say `make one` or `.venv/bin/grpo-megatron
two`, not `make` or `one`.

    python tools/three.py --four

```
make five && FIVE=6 make seven   # a comment
grpo-megatron eight [--nine]
                    [--ten]
make eleven \\
    twelve
no command
```

```console
$ grpo-megatron thirteen
fourteen
$ sbatch fifteen
```
"""


def test_commands_of_every_shape_are_found(tmp_path):
    (tmp_path / "page.md").write_text(SHAPES)
    found = [(command.text, command.output) for command in commands(tmp_path / "page.md")]
    assert found == [
        ("make one", None),
        ("grpo-megatron two", None),
        ("python tools/three.py --four", None),
        ("make five", None),
        ("make seven", None),
        ("grpo-megatron eight [--nine] [--ten]", None),
        ("make eleven twelve", None),
        ("grpo-megatron thirteen", "fourteen\n"),
        ("sbatch fifteen", None),
    ]
    (tmp_path / "train.sbatch").write_text("#!/bin/sh\n# Say: make one\n#\n#   sbatch two\nmake three\n")
    assert [command.text for command in commands(tmp_path / "train.sbatch")] == ["make one", "sbatch two"]
    assert row_of("grpo-megatron two") is row_of("make one") is None


# Commands that are run here


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a configuration that can be planned, and the run whose status docs/monitoring.md
    shows.
    """
    folder = tmp_path_factory.mktemp("documented")
    planned = yaml.safe_load(Path("configs/qwen3_8b_1node.yaml").read_text(encoding="utf-8"))
    planned["model"] = planned.get("model", {}) | {"path": "configs/models/qwen3-8b"}
    (folder / "qwen3_8b.yaml").write_text(yaml.safe_dump(planned))
    documented_run(folder / "run")
    return folder


def documented_run(run: Path) -> None:
    checkpoint = run / "checkpoints" / "step_00000020"
    checkpoint.mkdir(parents=True)
    continued_run(run)
    now = time.time()
    os.utime(checkpoint, (now - 151, now - 151))
    config = Config()
    config.run.name, config.model.path = "quickstart", "m"
    (run / "config.yaml").write_text(yaml.safe_dump(plain(config)))
    of_step = {
        "reward/mean": 0.9688,
        "actor/kl_to_reference": 0.01716,
        "actor/entropy": 0.00863,
        "actor/grad_norm": 0.2315,
    }
    of_step |= {"mismatch/max": 2.861e-06, "throughput/tokens_per_second": 1447.0, "time/step": 4.56}
    (run / "metrics.jsonl").write_text(
        json.dumps({"step": 38, **of_step, "time/train": 1.5, "time/other": 0.5}) + "\n"
    )
    status = {
        "run": "quickstart",
        "state": "running",
        "step": 38,
        "total_steps": 60,
        "eta": 57.0,
        "restarts": 0,
        "metrics": of_step,
    }
    # The run is on another machine, so that the file's age decides whether it goes on. These tests take less
    # than an hour.
    status |= {"host": "node17", "pid": 4711, "pid_started": now, "started": now - 432, "written": now + 3600}
    status |= {"phase": "train", "phase_since": now - 1, "evaluation_step": 0}
    ranks = "rank 3 (tp1 pp0 cp0 dp1 ep0) and 7 more"
    status["processes"] = [
        {"name": ranks, "phase": "mini_batches.train_step", "since": now - 1, "heard": now - 1}
    ]
    status["evaluation"] = {
        "eval/mean@4": 0.3955,
        "eval/pass@2": 0.6344,
        "eval/pass@4": 0.8691,
        "eval/greedy": 0.9238,
    }
    (run / STATUS).write_text(json.dumps(status))
    shown = Talk(trajectory_id=11).turn("What is 2+3?", "5").shown()
    (run / TEXTS).write_text(json.dumps({"step": 2, "trajectory": shown.row()}) + "\n")


def call(words: list[str], expected: int, capsys) -> str:
    """Run a command, which must end with this exit status, and return its output."""
    program, *rest = words
    if program == "python" and rest[0].startswith("tools/"):
        return "".join(run_tool(Path(rest[0]).stem, *rest[1:], status=expected))
    capsys.readouterr()
    try:
        status = main(rest) if program == "grpo-megatron" else submit.main(rest[1:])
    except SystemExit as exit_:  # --help, or an argument that is not there
        status = exit_.code or 0
    printed = "".join(capsys.readouterr())
    assert status == expected, printed
    return printed


def each(kind: type):
    return pytest.mark.parametrize("command", of_kind(kind), ids=lambda command: command[:80])


@each(Run)
def test_it_runs_as_documented(command, folder, capsys):
    row = row_of(command)
    if name := NAME_ALONE.fullmatch(command):
        printed = call([*name[1].split(), "--help"], 0, capsys)
        assert all(option in printed for option in ("usage: ", *name[3].split()))
        return
    values = {name: value.format(folder=folder) for name, value in row.values.items()}
    shown = [found.output for found in FOUND[command] if found.output]
    expected = 2 if any(output.startswith("error: ") for output in shown) else row.status
    for words in {tuple(arguments(command, values, optional)) for optional in (False, True)}:
        printed = call([*words, *row.extra], expected, capsys)
        assert all(printed == output for output in shown), "the page shows another output than the command's"


def test_the_documented_status_is_what_the_command_prints(folder, capsys):
    (shown,) = [block for block in blocks(ROOT / "docs/monitoring.md") if block.startswith("run  ")]
    printed = call(["grpo-megatron", "status", str(folder / "run")], 0, capsys)

    def without_times(text):
        return re.sub(r"\d\d:\d\d(?= ago|[:,\n])", "MM:SS", text)

    assert without_times(printed) == without_times(shown)


# Commands that other tests run, and those that none can


def reached(path: Path, name: str) -> str:
    """Return the source of a function and of everything in its file that it uses directly or indirectly.

    That includes functions, fixtures and constants. The result is "" if the function does not exist.
    """
    tree = ast.parse(path.read_text(encoding="utf-8"))
    defined: dict[str, ast.stmt] = {}
    for node in tree.body:
        targets = [node] if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) else []
        defined |= {target.name: node for target in targets}
        if isinstance(node, ast.Assign):
            defined |= {target.id: node for target in node.targets if isinstance(target, ast.Name)}
    wanted, seen = [name], {}
    while wanted:
        one = wanted.pop()
        if one in defined and one not in seen:
            seen[one] = ast.unparse(defined[one])
            used = [node for node in ast.walk(defined[one]) if isinstance(node, ast.Name | ast.arg)]
            wanted += [node.id if isinstance(node, ast.Name) else node.arg for node in used]
    return "\n".join(seen.values()).replace("'", '"') if name in seen else ""


@each(ByTest)
def test_the_test_that_runs_it_is_there(command):
    row = row_of(command)
    file, _, name = row.test.partition("::")
    source = reached(ROOT / file, name)
    assert source, f"there is no {row.test}"
    assert row.shows in source, f"nothing in {row.test} shows that it runs this"


@each(Needs)
def test_the_page_says_what_it_needs(command):
    row = row_of(command)
    for found in FOUND[command]:
        assert re.search(row.says, found.section), (
            f"{found.place}: the section should say that {command} needs {row.what}"
        )


@pytest.mark.parametrize("command", sorted(command for command in FOUND if command.startswith("make ")))
def test_make_has_the_target(command, tmp_path):
    """The target must also start what its row says."""
    target = re.sub(r"=\.\.\.", "=python3", command).split()[1]
    done = subprocess.run(
        ["make", "-n", target, f"VENV={tmp_path}", "PYTHON=python3"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    row = row_of(command)
    assert not isinstance(row, ByTest) or row.shows in done.stdout
