"""Packages that `make install-gpu` would install, and their order. Its pins must fit the code."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

from grpo_megatron.capabilities import TRANSFORMER_ENGINE_RELEASES, release
from grpo_megatron.commands import doctor


def pins(name: str) -> dict[str, str]:
    """Return {package: version} of a file in requirements/, in which every line must be a pin."""
    found = {}
    for line in Path("requirements", name).read_text().splitlines():
        if line and not line.startswith(("#", "-c ")):
            package, version = re.fullmatch(r"([\w.-]+)==([\w.]+)", line).groups()
            found[package.lower().replace("_", "-")] = version
    return found


def make(*arguments: str, status: int = 0) -> str:
    done = subprocess.run(["make", *arguments], capture_output=True, text=True)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_torch_comes_first_and_extensions_are_compiled_against_it(tmp_path):
    text = make("-n", "install-gpu", f"VENV={tmp_path}", "PYTHON=python3")
    installs = [line for line in text.splitlines() if " -m pip install " in line]
    files = [re.findall(r"-r requirements/([\w-]+)\.txt", line) for line in installs]
    assert files == [["gpu-torch"], ["gpu-transformer-engine"], ["gpu-torch", "gpu", "test"], []]
    assert "--no-deps --no-build-isolation" in installs[1]
    # The last one installs this project alone.
    assert ["-c requirements/gpu-lock.txt" in line for line in installs] == [True, True, True, False]
    assert {"torch", "ninja", "setuptools", "wheel"} <= pins("gpu-torch.txt").keys()


def test_nothing_can_bring_another_torch():
    first, rest = pins("gpu-torch.txt"), pins("gpu.txt")
    assert first["torch"] == "2.11.0"
    assert first.keys() & (rest.keys() | pins("gpu-transformer-engine.txt").keys()) == set()
    assert "-c gpu-torch.txt" in Path("requirements/gpu.txt").read_text().splitlines()


def test_versions_are_those_that_the_code_is_written_for():
    gpu = pins("gpu.txt") | pins("gpu-transformer-engine.txt")
    first, beyond = TRANSFORMER_ENGINE_RELEASES
    engines = {version for package, version in gpu.items() if package.startswith("transformer-engine")}
    assert len(engines) == 1
    assert first <= release(engines.pop()) < beyond
    assert gpu["megatron-core"] == doctor.MEGATRON_CORE
    assert gpu["sglang"] == doctor.SGLANG_ON_GPU
    assert f"sglang=={doctor.SGLANG}\n" in Path("requirements/cpu-no-deps.txt").read_text()
    megatron = [pins(name) for name in ("megatron.txt", "megatron-next.txt")]
    assert megatron == [{"megatron-core": doctor.MEGATRON_CORE}, {"megatron-core": doctor.MEGATRON_CORE_NEXT}]


def test_only_tested_releases_of_megatron_fit():
    (text,) = re.findall(r'"megatron-core(\S+)"', Path("setup.py").read_text())
    tested = [doctor.MEGATRON_CORE, doctor.MEGATRON_CORE_NEXT]
    others = ["0.15.3", "0.17.0", "0.18.2", "0.20.0"]
    assert [release for release in tested + others if release in SpecifierSet(text)] == tested


@pytest.mark.parametrize(
    ("stamp", "arguments", "says"),
    [
        (".installed", [], "has the stack for CPUs; name another environment: make install-gpu VENV=..."),
        (None, ["CUDA_HOME=/nowhere"], "no CUDA 13 toolkit in /nowhere (bin/nvcc); name its folder"),
        (".installed", ["install", "STACK=next"], "another environment: make install STACK=next VENV=..."),
        (".installed-gpu", ["install", "STACK=next"], "has the stack for GPUs; name another environment"),
        (".installed-next", [], "has the stack for CPUs; name another environment: make install-gpu"),
        (None, ["install", "STACK=newest"], "STACK=newest is unknown; the choice is STACK=next or no STACK"),
    ],
)
def test_what_cannot_be_installed_is_refused_before_anything_is(tmp_path, stamp, arguments, says):
    if stamp:
        (tmp_path / stamp).touch()
    target = [] if "install" in arguments else ["install-gpu"]
    assert says in make(*target, *arguments, f"VENV={tmp_path}", status=2)
    assert [path.name for path in tmp_path.iterdir()] == ([stamp] if stamp else [])


def test_the_range_of_pythons(tmp_path):
    ranges = {"install": (11, 13), "install STACK=next": (12, 13), "install-gpu": (11, 12)}
    for targets, (oldest, newest) in ranges.items():
        text = make("-n", *targets.split(), f"VENV={tmp_path}", "PYTHON=python3")
        assert f"(3, {oldest}) <= sys.version_info[:2] <= (3, {newest})" in text


def test_an_environment_keeps_its_stack(tmp_path):
    """`make test` after `make install STACK=next` must not install the other Megatron over it."""
    arguments = ("-n", "install", f"VENV={tmp_path}", "PYTHON=python3")
    assert "-r requirements/megatron.txt" in make(*arguments)
    assert "-r requirements/megatron-next.txt" in make(*arguments, "STACK=next")
    (tmp_path / ".installed-next").touch()
    assert "-r requirements/megatron.txt" not in make(*arguments)


def test_an_environment_for_gpus_stays_one(tmp_path):
    assert "requirements/cpu.txt" in make("-n", "install", f"VENV={tmp_path}")
    (tmp_path / ".installed-gpu").touch()
    assert "requirements/cpu.txt" not in make("-n", "install", f"VENV={tmp_path}")


def test_files_that_are_not_python_are_installed(tmp_path):
    """Presets and templates of the report are package data, which setup.py lists."""
    command = [sys.executable, "setup.py", "-q", "build_py", "--build-lib", str(tmp_path)]
    subprocess.run(command, check=True, capture_output=True)
    wanted = {
        path for path in Path("grpo_megatron").rglob("*.*") if path.suffix in (".yaml", ".html", ".css")
    }
    assert any(path.suffix == ".html" for path in wanted)
    assert wanted == {path for path in wanted if (tmp_path / path).is_file()}


def sources_of(container: str, text: str) -> list[str]:
    """Return the files that a container is made of."""
    if container == "Dockerfile":
        return [
            source
            for sources in re.findall(r"^COPY (.+) \S+$", text, flags=re.M)
            for source in sources.split()
        ]
    copied = [line.split() for line in text.partition("%files\n")[2].partition("\n\n")[0].splitlines()]
    assert all(target == f"/opt/grpo_megatron/{source}" for source, target in copied)
    return [source for source, _ in copied]


@pytest.mark.parametrize("container", ["Dockerfile", "apptainer.def"])
def test_a_container_is_made_of_what_is_here(container):
    text = Path(container).read_text().replace("\\\n", " ")
    sources = sources_of(container, text)
    assert {"requirements", "Makefile", "setup.py"} <= set(sources)
    assert all(Path(source).exists() for source in sources)
    makefile = Path("Makefile").read_text()
    targets = re.search(r"^\.PHONY: (.+)$", makefile, flags=re.M)[1].split()
    (command,) = re.findall(r"\bmake (install.+)$", text, flags=re.M)
    target, *variables = command.split()
    assert target == "install-gpu"
    assert target in targets
    assert all(f"$({variable.split('=')[0]})" in makefile for variable in variables)
    (python,) = (variable.split("=")[1] for variable in variables if variable.startswith("PYTHON="))
    (listed,) = re.findall(r"grep -v '\^#' (\S+) \|", text)
    packages = Path(listed).read_text().splitlines()
    # The first makes the environment to install into. Extensions are compiled with the headers of the second.
    assert {f"{python}-venv", f"{python}-dev"} <= set(packages)
    assert re.search(r"^(FROM|From:) nvidia/cuda:13\.\S+-devel-", text, flags=re.M)


def test_both_containers_are_of_the_same():
    def parts(name: str) -> tuple:
        text = Path(name).read_text()
        return (
            re.findall(r"nvidia/cuda:\S+", text),
            re.findall(r"make install-gpu .+", text),
            re.findall(r"/opt/\S+/bin", text),
        )

    assert parts("Dockerfile") == parts("apptainer.def")
    assert all(len(part) == 1 for part in parts("Dockerfile"))


@pytest.mark.parametrize(
    ("problems", "says"),
    [(0, "no problems: sft and train can run here"), (1, "1 problem"), (2, "2 problems")],
)
def test_the_doctor_counts_problems_and_not_notes(monkeypatch, capsys, problems, says):
    note, problem = (doctor.Diagnosis(level, "it", "so") for level in (doctor.NOTE, doctor.PROBLEM))
    monkeypatch.setattr(doctor, "examine", lambda: [note, *[problem] * problems])
    assert doctor.doctor() == min(problems, 1)
    assert capsys.readouterr().out.splitlines()[-1] == says
