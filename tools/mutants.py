"""Mutation testing: plant small faults in source files, one at a time, and list those that no test notices.

    make mutants FILES="grpo_megatron/batch/*.py"
    python tools/mutants.py grpo_megatron/batch/schedule.py --tests tests/unit/test_schedule.py
    python tools/mutants.py grpo_megatron/rollout/*.py --sample 300
    python tools/mutants.py --show grpo_megatron.batch.packing.x_pack__mutmut_4

mutmut makes the faults and runs the tests. By default these are the files in tests/unit that import a module
of a mutated file's package; --tests names others. For each fault, only the tests that execute the changed
function are run. --sample tries some of the faults, chosen at random with a fixed seed, to estimate the share
that is caught. Everything happens in a copy of the tracked files in .mutants/.

The output shows the changed lines of each fault that was not caught. Its last line is a JSON object.

Ignore a fault that survives if it changes only speed or the wording of a message, or nothing at all, or if a
test in tests/parallel or tests/integration notices it. For any other, write a test that it makes fail, with
numbers computed by hand or by a simple reference.
"""

import argparse
import ast
import difflib
import json
import os
import random
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from grpo_megatron.files import json_text

ROOT = Path(__file__).resolve().parent.parent
COPY = ROOT / ".mutants"
# Exit statuses that mutmut writes into its .meta files: 33 if no test executes the function, 5 if pytest
# found no test to run. Any other status but 0 means that a test noticed the fault.
_SURVIVED, _NO_TESTS = 0, (5, 33)


def tracked_files() -> list[Path]:
    listing = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True, text=True
    ).stdout
    return [path for name in listing.split("\0") if name and (path := Path(name)).is_file()]


def imported_modules(path: Path) -> set[str]:
    """Return the names of the modules that a source file imports, at its top or inside its functions.

    `from a import b` gives both a and a.b, because b may be a module.
    """
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
            found |= {f"{node.module}.{name.name}" for name in node.names}
        elif isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
    return found


def tests_of(files: list[Path]) -> list[Path]:
    """Return the files in tests/unit that import a module from the package of at least one of `files`."""
    packages = {".".join(file.parent.parts) for file in files}
    tests = sorted(Path("tests/unit").glob("test_*.py"))
    return [
        test
        for test in tests
        if any(name.startswith(f"{package}.") for name in imported_modules(test) for package in packages)
    ]


def with_late_decorators(source: str) -> str:
    """Return source text that decorates each function after its definition: `f = decorator(f)`.

    mutmut does not mutate functions with a decorator, so it would skip advantage estimators, surrogates and
    properties. Functions with staticmethod or classmethod stay as they are, because mutmut knows these
    decorators. So do setters of properties, because their decorator uses the property's name.
    """
    lines = source.splitlines(keepends=True)
    functions = [
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    for function in sorted(functions, key=lambda node: node.lineno, reverse=True):
        decorators = [ast.unparse(decorator) for decorator in function.decorator_list]
        if not decorators or any(
            name in ("staticmethod", "classmethod") or name.endswith(".setter") for name in decorators
        ):
            continue
        call = function.name
        for decorator in reversed(decorators):
            call = f"{decorator}({call})"
        lines.insert(function.end_lineno, f"{' ' * function.col_offset}{function.name} = {call}\n")
        del lines[function.decorator_list[0].lineno - 1 : function.lineno - 1]
    return "".join(lines)


def make_copy(files: list[Path], tests: list[Path]) -> None:
    """Copy the tracked files into .mutants/ and write mutmut's settings beside them.

    files: source files to mutate.
    tests: test files or folders to run.
    """
    shutil.rmtree(COPY, ignore_errors=True)
    tracked = tracked_files()
    for path in tracked:
        (COPY / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / path, COPY / path)
    for file in files:
        (COPY / file).write_text(with_late_decorators(file.read_text(encoding="utf-8")), encoding="utf-8")
    others = sorted({path.parts[0] for path in tracked} - {"grpo_megatron"})
    settings = {
        "source_paths": ["grpo_megatron"],
        "only_mutate": files,
        "also_copy": others,
        "pytest_add_cli_args_test_selection": tests,
    }
    lines = [
        line
        for key, values in settings.items()
        for line in (f"{key} =", *(f"    {value}" for value in values))
    ]
    (COPY / "setup.cfg").write_text("\n".join(["[mutmut]", *lines, ""]), encoding="utf-8")


def mutmut(*words: str, quiet: bool = False) -> int:
    # One thread, because a forked process does not inherit the threads of torch's pool.
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "mutmut", *words]
    return subprocess.run(command, cwd=COPY, env=environment, capture_output=quiet).returncode


def sample_of(files: list[Path], size: int) -> list[str]:
    """Have mutmut make the faults of the files, but test none. Return the names of some faults.

    size: number of faults to choose at random, always with the same seed. If there are fewer, all are chosen.
    """
    # mutmut makes all faults before it looks for the ones to try. It finds none of this name and ends.
    mutmut("run", "--max-children", "1", "no fault", quiet=True)
    names = sorted(name for _, statuses in results(files) for name in statuses)
    return random.Random(0).sample(names, min(size, len(names)))


def results(files: list[Path]) -> Iterator[tuple[Path, dict[str, int | None]]]:
    """Yield (file, {mutant: exit status of its tests}) for each mutated file.

    The exit status is None if the tests have not run.
    """
    for file in files:
        meta = COPY / "mutants" / f"{file}.meta"
        if meta.exists():
            yield file, json.loads(meta.read_text(encoding="utf-8"))["exit_code_by_key"]


def function_of(mutant: str) -> str:
    """Return a readable name of a mutant's function: `module._pack` for `module.x__pack__mutmut_4`."""
    module, _, name = re.sub(r"__mutmut_\d+$", "", mutant).rpartition(".")
    return f"{module}.{name.removeprefix('xǁ').removeprefix('x_').replace('ǁ', '.')}"


def changed_lines(file: Path) -> dict[str, str]:
    """Return {mutant: text with the lines that it removes and adds} for the mutants of a file.

    The keys are the names of the mutants without the module's name.
    """
    source = (COPY / "mutants" / file).read_text(encoding="utf-8")
    texts = {
        node.name: (ast.get_source_segment(source, node) or "").splitlines()[1:]
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and "__mutmut_" in node.name
    }
    found = {}
    for name, text in texts.items():
        original = texts[re.sub(r"__mutmut_\w+$", "__mutmut_orig", name)]
        changed = [line for line in difflib.ndiff(original, text) if line.startswith(("- ", "+ "))]
        found[name] = "".join(f"\n        {line[:2]}{line[2:].strip()}" for line in changed)
    return found


def print_results(files: list[Path]) -> None:
    total: Counter[str] = Counter()
    survivors: dict[str, list[str]] = {}
    print(f"{'file':56} {'mutants':>8} {'caught':>8} {'survived':>9} {'no test':>8}")
    for file, statuses in results(files):
        run = {mutant: status for mutant, status in statuses.items() if status is not None}
        survived = [mutant for mutant, status in run.items() if status == _SURVIVED]
        untested = [mutant for mutant, status in run.items() if status in _NO_TESTS]
        counts = Counter(mutants=len(run), survived=len(survived), no_test=len(untested))
        counts["caught"] = len(run) - len(survived) - len(untested)
        total += counts
        changes = changed_lines(file)
        for mutant in survived + untested:
            change = changes.get(mutant.rpartition(".")[2]) or " (in the function's first line: see --show)"
            survivors.setdefault(function_of(mutant), []).append(mutant + change)
        print(
            f"{file!s:56} {counts['mutants']:8} {counts['caught']:8} "
            f"{counts['survived']:9} {counts['no_test']:8}"
        )
    for function, mutants in sorted(survivors.items(), key=lambda item: -len(item[1])):
        print(f"\n{function}: {len(mutants)} not caught\n    " + "\n    ".join(mutants))
    keys = ("mutants", "caught", "survived", "no_test")
    share = total["caught"] / total["mutants"] if total["mutants"] else None
    print(json_text({key: total[key] for key in keys} | {"caught_share": share}))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "files",
        nargs="*",
        type=Path,
        help="source files below grpo_megatron/, relative to the repository's root",
    )
    parser.add_argument(
        "--tests",
        nargs="+",
        type=Path,
        help="test files or folders, in place of those that import the files' packages",
    )
    parser.add_argument(
        "--processes", type=int, default=os.cpu_count(), help="tests that run at the same time"
    )
    parser.add_argument(
        "--sample", type=int, metavar="N", help="try N of the faults, chosen at random; default: all"
    )
    parser.add_argument("--show", metavar="MUTANT", help="show one fault of the last run as a diff")
    args = parser.parse_args()
    os.chdir(ROOT)
    if args.show:
        sys.exit(mutmut("show", args.show))
    missing = [str(file) for file in args.files if not (file.is_file() and file.parts[0] == "grpo_megatron")]
    if missing or not args.files:
        parser.error(
            f"not a file below grpo_megatron/: {', '.join(missing)}"
            if missing
            else "name at least one source file"
        )
    tests = args.tests or tests_of(args.files)
    if not tests:
        parser.error("no file in tests/unit imports the packages of these files; name tests with --tests")
    make_copy(args.files, tests)
    names = sample_of(args.files, args.sample) if args.sample else []
    mutmut("run", "--max-children", str(args.processes), *names)
    if all(exit_status is None for _, statuses in results(args.files) for exit_status in statuses.values()):
        sys.exit("no fault was tried: the lines above say why, such as a test that fails without any fault")
    print_results(args.files)


if __name__ == "__main__":
    main()
