"""Environment and arguments of the processes of a GPU run: tools, libraries, NCCL's settings.

On a GPU machine without a container, every engine would have ended at its start. The loader did not find the
CUDA runtime of the library that is preloaded (status 127), and SGLang did not find ninja to compile its
kernels with.
"""

import os
import shutil
import subprocess
import sys
from contextlib import nullcontext
from importlib import util
from pathlib import Path

import pytest
from ray._private.utils import update_envs

from grpo_megatron.cluster import gpu_environment, placement
from grpo_megatron.cluster.placement import Cluster, Slot
from grpo_megatron.config.engine import EngineConfig, Quantization
from grpo_megatron.config.rollout import OnUpdate, RolloutConfig
from grpo_megatron.config.schema import ModelConfig
from grpo_megatron.errors import UserError
from grpo_megatron.sglang import release, start
from grpo_megatron.sglang.arguments import engine_arguments, engine_environment
from grpo_megatron.sglang.release import GPU_ARGUMENTS
from grpo_megatron.trainer import ranks
from tests.tools import unpacked

BIN = str(Path(sys.executable).parent)


@pytest.fixture
def environments(monkeypatch):
    """environments(**variables of the driver): the environments that Ray is asked to set for a rank and
    for an engine.
    """
    monkeypatch.setattr(placement, "_loopback_variables", dict)

    def of_both(slot=Slot(0, "node", 3), engine=EngineConfig(), **variables) -> tuple[dict, dict]:
        for name in (
            *gpu_environment.NCCL_DEFAULTS,
            "CUDA_HOME",
            "CUDA_PATH",
            "TORCHINDUCTOR_COMPILE_THREADS",
        ):
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        cluster = Cluster(None, [slot], [[slot]])
        gpu = slot.device is not None
        asked = ranks._environment(slot), engine_environment(engine, gpu)
        return tuple(cluster.options(slot, own)["runtime_env"]["env_vars"] for own in asked)

    return of_both


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, ("0", "0")),
        ({"NCCL_CUMEM_ENABLE": "1"}, ("1", "0")),
        ({"NCCL_NVLS_ENABLE": "2"}, ("0", "2")),
        ({"NCCL_CUMEM_ENABLE": "1", "NCCL_NVLS_ENABLE": "1"}, ("1", "1")),
        ({"NCCL_CUMEM_ENABLE": "0"}, ("0", "0")),
        ({"NCCL_CUMEM_HOST_ENABLE": "1"}, ("0", "0")),
    ],
)
def test_nccl_is_set_alike_in_ranks_and_engines(environments, variables, expected):
    """SGLang switches cuMem off, but NCCL switches it on in ranks, and groups of both fail or hang."""
    rank, engine = environments(**variables)
    both = ("NCCL_CUMEM_ENABLE", "NCCL_NVLS_ENABLE")
    assert tuple(rank[name] for name in both) == tuple(engine[name] for name in both) == expected


def test_ranks_and_engines_differ_in_nothing_else_of_nccl_and_cuda(environments):
    rank, engine = environments()
    shared = {
        name for name in rank.keys() | engine.keys() if name.startswith(("NCCL", "CUDA", "PATH", "LD_"))
    }
    # SGLang sets its own number in its schedulers, see docs/gpu.md.
    shared -= {"CUDA_DEVICE_MAX_CONNECTIONS"}
    assert {name: rank.get(name) for name in shared} == {name: engine.get(name) for name in shared}
    assert shared - {"CUDA_HOME"} == {"NCCL_CUMEM_ENABLE", "NCCL_NVLS_ENABLE", "CUDA_VISIBLE_DEVICES", "PATH"}


def test_processes_without_a_gpu_get_none_of_it(environments):
    for variables in environments(Slot(0, "node", None), CUDA_HOME="/opt/cuda"):
        assert not variables.keys() & {"PATH", "NCCL_CUMEM_ENABLE", "CUDA_HOME", "LD_LIBRARY_PATH"}


@pytest.mark.parametrize("path", ["/usr/bin:/bin", "/opt/conda/bin", f"{BIN}:/bin", ""])
def test_programs_of_the_environment_come_first_on_a_nodes_own_path(environments, monkeypatch, path):
    """The driver's PATH may differ from the node's. Ray and the doctor fill in the node's."""
    for variables in environments(PATH="/only/on/the/driver"):
        filled = gpu_environment.filled_in(variables, {"PATH": path, "HOME": "/h"})
        with monkeypatch.context() as patch:
            patch.setattr(os, "environ", {"PATH": path, "HOME": "/h"})
            update_envs(variables)
            assert filled == os.environ
        assert filled["PATH"] == f"{BIN}:{path}"
        assert shutil.which(Path(sys.executable).name, path=filled["PATH"]) == str(
            Path(BIN, Path(sys.executable).name)
        )


@pytest.fixture
def toolkits(tmp_path, monkeypatch):
    """A function toolkit(folder, ...) that makes CUDA toolkits. The default place is the folder `usual`."""
    monkeypatch.setattr(gpu_environment, "_TOOLKIT", str(tmp_path / "usual"))

    def make(*folders: str) -> None:
        for folder in folders:
            (tmp_path / folder / "bin").mkdir(parents=True)
            (tmp_path / folder / "bin" / "nvcc").touch(mode=0o755)

    return make


@pytest.mark.parametrize(
    ("there", "variables", "expected"),
    [
        (["usual"], {}, "usual"),
        (["usual", "site"], {"CUDA_HOME": "{}/site"}, "site"),
        (["usual", "site"], {"CUDA_PATH": "{}/site"}, "site"),
        (["usual", "site", "other"], {"CUDA_HOME": "{}/site", "CUDA_PATH": "{}/other"}, "site"),
        (["usual"], {"CUDA_HOME": ""}, "usual"),
        (["site"], {"PATH": "{}/site/bin:/bin"}, "site"),
        # A link on PATH, such as /usr/local/bin/nvcc: SGLang took /usr/local for the toolkit, and linked
        # nothing.
        (["usual"], {"PATH": "{}/links:/bin"}, "usual"),
        (["site"], {"PATH": "{}/links:/bin"}, "site"),
        ([], {"PATH": "/bin"}, None),
    ],
)
def test_the_toolkit_that_kernels_are_built_with(
    environments, toolkits, tmp_path, there, variables, expected
):
    toolkits(*there)
    (tmp_path / "links").mkdir()
    for folder in there:
        (tmp_path / "links" / "nvcc").unlink(missing_ok=True)
        (tmp_path / "links" / "nvcc").symlink_to(tmp_path / folder / "bin" / "nvcc")
    both = environments(**{name: value.format(tmp_path) for name, value in variables.items()})
    assert [asked.get("CUDA_HOME") for asked in both] == [expected and str(tmp_path / expected)] * 2


@pytest.mark.parametrize(
    ("environ", "says"),
    [
        ({"NCCL_NVLS_ENABLE": "1"}, "NCCL_NVLS_ENABLE=1 has no effect"),
        ({"NCCL_NVLS_ENABLE": "2", "NCCL_CUMEM_ENABLE": "0"}, "NCCL_NVLS_ENABLE=2 has no effect"),
        ({"CUDA_DEVICE_MAX_CONNECTIONS": "8"}, "CUDA_DEVICE_MAX_CONNECTIONS=8 has no effect"),
        ({"CUDA_HOME": "/nowhere"}, "the CUDA toolkit /nowhere has no bin/nvcc"),
        ({"CUDA_PATH": "/no/path"}, "the CUDA toolkit /no/path has no bin/nvcc"),
    ],
)
def test_a_setting_that_has_no_effect_is_said(environ, says):
    (line,) = gpu_environment.conflicts(environ)
    assert line.startswith(says)


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"NCCL_CUMEM_ENABLE": "1"},
        {"NCCL_NVLS_ENABLE": "1", "NCCL_CUMEM_ENABLE": "1"},
        {"NCCL_NVLS_ENABLE": "0"},
        {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "CUDA_HOME": ""},
        {"CUDA_HOME": "{}/site"},
    ],
)
def test_settings_that_hold_are_no_conflict(environ, toolkits, tmp_path):
    toolkits("site")
    environ = {name: value.format(tmp_path) for name, value in environ.items()}
    assert gpu_environment.conflicts(environ) == []


@pytest.mark.parametrize("own", [None, "0", "1"])
def test_engines_in_fp8_warm_up_fast_unless_the_user_says_otherwise(environments, monkeypatch, own):
    """SGLang compiles kernels for 16,384 sizes, which takes 10 to 20 minutes according to SGLang."""
    monkeypatch.delenv("SGLANG_JIT_DEEPGEMM_FAST_WARMUP", raising=False)
    if own is not None:
        monkeypatch.setenv("SGLANG_JIT_DEEPGEMM_FAST_WARMUP", own)
    _, engine = environments(engine=EngineConfig(quantization=Quantization.fp8))
    assert engine["SGLANG_JIT_DEEPGEMM_FAST_WARMUP"] == (own or "1")
    assert "SGLANG_JIT_DEEPGEMM_FAST_WARMUP" not in environments()[1]


@pytest.mark.parametrize("own", [None, "16"])
def test_ranks_compile_in_few_processes_unless_the_user_says_otherwise(environments, own):
    rank, engine = environments(**({"TORCHINDUCTOR_COMPILE_THREADS": own} if own else {}))
    assert rank["TORCHINDUCTOR_COMPILE_THREADS"] == (own or "4")
    assert "TORCHINDUCTOR_COMPILE_THREADS" not in engine


def packages_with(folder: Path, *libraries: str) -> Path:
    for library in libraries:
        path = folder / "nvidia" / library
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    return folder


@pytest.mark.parametrize(
    ("libraries", "cuda", "before", "expected"),
    [
        (["cu13/lib/libcudart.so.13"], "13.0", None, "{}/nvidia/cu13/lib"),
        (["cu13/lib/libcudart.so.13"], "13.0", "", "{}/nvidia/cu13/lib"),
        (["cu13/lib/libcudart.so.13"], "13.0", "/site/lib:/opt", "{}/nvidia/cu13/lib:/site/lib:/opt"),
        (
            ["cu13/lib/libcudart.so.13", "cuda_runtime/lib/libcudart.so.12"],
            "12.8",
            None,
            "{}/nvidia/cuda_runtime/lib",
        ),
        (["cuda_runtime/lib/libcudart.so.12"], "13.0", "/site/lib", None),  # the site's toolkit may have it
        (["cu13/lib/libcudart.so.13"], None, "/site/lib", None),  # torch for CPUs
        ([], "13.0", None, None),
    ],
)
def test_the_cuda_runtime_beside_torch_is_found(tmp_path, libraries, cuda, before, expected):
    environ = {} if before is None else {"LD_LIBRARY_PATH": before}
    found = gpu_environment.preload_environment(environ, cuda, packages_with(tmp_path, *libraries))
    assert found == ({"LD_LIBRARY_PATH": expected.format(tmp_path)} if expected else {})


def test_the_pinned_memory_saver_can_be_preloaded(tmp_path):
    """The library and the CUDA runtime are the GPU stack's. The driver is an empty library."""
    loader, compiler = Path("/lib64/ld-linux-x86-64.so.2"), shutil.which("gcc")
    if not (loader.exists() and compiler):
        pytest.skip("needs gcc, and the loader of Linux on x86-64")
    library = unpacked("torch_memory_saver==0.0.10") / "torch_memory_saver_hook_mode_preload_cu13.abi3.so"
    packages = unpacked("nvidia-cuda-runtime==13.0.96")
    driver = [
        "-shared",
        "-Wl,-soname,libcuda.so.1",
        "-o",
        str(tmp_path / "libcuda.so.1"),
        "-x",
        "c",
        "/dev/null",
    ]
    subprocess.run([compiler, *driver], check=True)
    environ = {"LD_LIBRARY_PATH": str(tmp_path)}

    def preloaded(**more: str) -> subprocess.CompletedProcess:
        # Without the loader's cache, in which this machine may have a toolkit.
        command = [loader, "--inhibit-cache", "--preload", library, shutil.which("cat"), "/proc/self/maps"]
        return subprocess.run(command, env=environ | more, capture_output=True, text=True)

    before = preloaded()
    assert before.returncode == 127
    assert "libcudart.so.13: cannot open shared object file" in before.stderr
    found = preloaded(**gpu_environment.preload_environment(environ, "13.0", packages))
    assert found.returncode == 0, found.stderr
    assert str((packages / "nvidia/cu13/lib/libcudart.so.13").resolve()) in found.stdout
    assert str(library.resolve()) in found.stdout


@pytest.mark.parametrize(("saver", "set_"), [(True, True), (False, False)])
def test_an_engines_schedulers_inherit_the_library_path(monkeypatch, tmp_path, saver, set_):
    """SGLang's Engine starts its schedulers with the environment of the process that makes it."""
    monkeypatch.setenv("LD_LIBRARY_PATH", "/site/lib")
    monkeypatch.setattr(
        start,
        "preload_environment",
        lambda environ, cuda: {"LD_LIBRARY_PATH": f"/runtime:{environ['LD_LIBRARY_PATH']}"},
    )
    child = "import os; print(os.environ['LD_LIBRARY_PATH'])"

    class Engine:
        def __init__(self, **arguments):
            self.seen = subprocess.run(
                [sys.executable, "-S", "-c", child], capture_output=True, text=True
            ).stdout.strip()

    entry = "sglang.srt.entrypoints.engine"
    for name in ("sglang", "sglang.srt", "sglang.srt.entrypoints", entry):
        monkeypatch.setitem(sys.modules, name, type(sys)(name))
    for name, inner in (
        ("sglang", "srt"),
        ("sglang.srt", "entrypoints"),
        ("sglang.srt.entrypoints", "engine"),
    ):
        setattr(sys.modules[name], inner, sys.modules[f"{name}.{inner}"])
    sys.modules[entry].Engine = Engine
    assert start.start_engine({"enable_memory_saver": saver}).seen == (
        "/runtime:/site/lib" if set_ else "/site/lib"
    )


def test_engines_on_gpus_capture_no_prefill_graphs():
    """SGLang captures them by default, and may then compute a prompt's keys and values wrongly."""
    config, model = EngineConfig(dtype="bfloat16"), ModelConfig("configs/models/qwen3-4b")
    for gpu in (True, False):
        found = engine_arguments(config, model, 0, needs_tokenizer=False, gpu=gpu, routing=False)
        assert found.get("cuda_graph_backend_prefill") == ("disabled" if gpu else None)


@pytest.mark.parametrize(
    ("dtype", "attention"), [("bfloat16", None), ("float16", None), ("float32", "torch_native")]
)
def test_attention_in_float32_is_torchs(dtype, attention):
    """SGLang chooses FlashAttention 3 on Hopper, which has no kernels for float32."""
    found = engine_arguments(
        EngineConfig(dtype=dtype),
        ModelConfig("configs/models/qwen3-4b"),
        0,
        needs_tokenizer=False,
        gpu=True,
        routing=False,
    )
    assert found.get("attention_backend") == attention


@pytest.mark.parametrize("release", ["sglang==0.5.17", None])
def test_prefill_graphs_of_the_pinned_releases_have_the_fault(release):
    """SGLang holds the inputs if this test fails.

    Then see whether release.GPU_ARGUMENTS can leave graphs on.
    """
    place = (
        unpacked(release) / "sglang"
        if release
        else Path(util.find_spec("sglang").submodule_search_locations[0])
    )
    path = place / "srt/model_executor/runner_backend_utils/breakable_cuda_graph/breakable_cuda_graph.py"
    assert "captured_args = tuple(_weak_ref_if_tensor(a) for a in args)" in path.read_text()
    assert GPU_ARGUMENTS["cuda_graph_backend_prefill"] == "disabled"


@pytest.mark.parametrize("installed", ["0.5.17", "0.5.20", "0.5.23.post1", "0.0.0.dev1"])
def test_updates_while_requests_run_need_a_release_that_reports_spans(installed, monkeypatch):
    """A build without a known version number may be new enough."""
    monkeypatch.setattr(release, "version", lambda package: installed)
    for on_update in OnUpdate:
        allowed = on_update == OnUpdate.wait or installed != "0.5.17"
        with nullcontext() if allowed else pytest.raises(UserError, match=r"needs SGLang 0\.5\.20 or later"):
            release.check_release(RolloutConfig(on_update=on_update))
