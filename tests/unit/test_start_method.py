"""Processes that use CUDA are never forked, and modules that need no Ray can be imported without it.

On the first GPU machine every `cuda-*` case of tests/gpu would have failed with "Cannot re-initialize CUDA in
forked subprocess": the ranks were forked from a process in which importing Megatron had asked for devices.
With a CPU build of torch nothing reveals that.
"""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from grpo_megatron.capabilities import start_method
from grpo_megatron.model.parallel_sizes import ParallelSizes
from tests.ranks import rank_pool

ROOT = Path(__file__).parents[2]
SOURCES = [
    path
    for folder in ("tests", "benchmarks", "tools", "grpo_megatron")
    for path in (ROOT / folder).rglob("*.py")
]
# None of these processes has imported torch before it forks, or uses torch afterwards.
FORKS_WITHOUT_TORCH = {
    "grpo_megatron/commands/keeper.py",
    "grpo_megatron/sandbox/child.py",
    "grpo_megatron/sandbox/helper.py",
    "tests/integration/stranger.py",
    "tests/unit/test_sandbox.py",
    "tests/unit/tool_server.py",
}
# Used by engines on a CPU only, see sglang.start.
FORKS_ON_CPU_ONLY = {"grpo_megatron/sglang/without_gpu/forking.py"}
DEFAULT_METHOD = {"multiprocessing.Process", "multiprocessing.Pool", "ProcessPoolExecutor"}


def forks(source: str) -> list[str]:
    """Return the lines of a file on which a process may be forked, as `line: code`."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and (why := _may_fork(node)):
            found.append(f"{node.lineno}: {why}")
    return found


def _may_fork(call: ast.Call) -> str | None:
    text, called = ast.unparse(call), ast.unparse(call.func)
    name, keywords = called.rpartition(".")[2], {keyword.arg for keyword in call.keywords}
    if name in ("fork", "forkpty") and called.startswith("os."):
        return text
    if name in ("get_context", "set_start_method"):
        given = [*call.args, *(keyword.value for keyword in call.keywords)]
        # tests.ranks passes on what start_method returned, as `method`.
        safe = {"'spawn'", "start_method()", "method"}
        return None if given and ast.unparse(given[0]) in safe else text
    return text if called in DEFAULT_METHOD and "mp_context" not in keywords else None


def test_no_helper_forks_a_process_that_may_have_asked_for_devices():
    found = {str(path.relative_to(ROOT)): forks(path.read_text(encoding="utf-8")) for path in SOURCES}
    allowed = FORKS_WITHOUT_TORCH | FORKS_ON_CPU_ONLY
    assert {path: lines for path, lines in found.items() if lines and path not in allowed} == {}
    assert all(found[path] for path in allowed), "a file that forks no more needs no exception"


@pytest.mark.parametrize(
    "line",
    [
        "multiprocessing.get_context('fork')",
        "multiprocessing.get_context()",
        "get_context(method='fork')",
        "multiprocessing.get_context('fork' if options.dry_run else 'spawn')",
        "multiprocessing.set_start_method('forkserver')",
        "multiprocessing.Process(target=f)",
        "multiprocessing.Pool(2)",
        "ProcessPoolExecutor(4)",
        "os.fork()",
    ],
)
def test_a_fork_is_noticed(line):
    assert forks(line)


@pytest.mark.parametrize(
    "line", ["get_context('spawn')", "get_context(start_method())", "ProcessPoolExecutor(1, mp_context=c)"]
)
def test_a_spawned_process_is_no_fork(line):
    assert forks(line) == []


@pytest.mark.parametrize(("cuda", "method"), [(None, "fork"), ("12.8", "spawn"), ("13.0", "spawn")])
def test_the_build_of_torch_decides(monkeypatch, cuda, method):
    """The machine does not matter: a CUDA build asks for devices even if there are none."""
    monkeypatch.setattr(torch.version, "cuda", cuda)
    assert start_method() == method


@pytest.mark.slow
@pytest.mark.parametrize("cuda", [None, "13.0"])
def test_ranks_are_spawned_where_torch_is_a_cuda_build(monkeypatch, cuda):
    monkeypatch.setattr(torch.version, "cuda", cuda)
    with rank_pool() as pool:
        forked = [
            pool.run(parent_imported_megatron, sizes) for sizes in (ParallelSizes(), ParallelSizes(tp=2))
        ]
    assert forked == [[cuda is None], [cuda is None] * 2]


def parent_imported_megatron() -> bool:
    """Return whether the process that started this one has torch's files mapped, which only a fork needs."""
    maps = Path(f"/proc/{os.getppid()}/maps").read_text()
    return "libtorch" in maps


# Imports all of tests/gpu, and the sections of benchmarks/gpu.py that do not name Ray as a package they need.
WITHOUT_RAY = """
import importlib, sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "ray":
            raise ModuleNotFoundError("No module named 'ray'")

sys.meta_path.insert(0, Blocked())
sys.path[:0] = ["benchmarks", "tools"]
import gpu
sections = [section for section in gpu.SECTIONS.values() if "ray" not in section.packages]
names = {"on_gpu." + section.function.partition(".")[0] for section in sections}
for name in sorted(names) + sys.argv[1:]:
    importlib.import_module(name)
print(*sorted(names))
"""


@pytest.mark.slow
def test_what_is_measured_on_a_gpu_needs_no_ray():
    """A machine without a network may have no Ray. Every section used to end in an ImportError there."""
    tests = [
        f"tests.gpu.{path.stem}"
        for path in sorted((ROOT / "tests" / "gpu").glob("*.py"))
        if path.stem != "__init__"
    ]
    assert {"tests.gpu.checks", "tests.gpu.test_smoke", "tests.gpu.test_host_memory"} <= set(tests)
    command = [sys.executable, "-W", "ignore", "-c", WITHOUT_RAY, *tests]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=200)
    assert done.returncode == 0, done.stderr[-2000:]
    assert set(done.stdout.split()) >= {"on_gpu.training", "on_gpu.weights", "on_gpu.arithmetic"}
