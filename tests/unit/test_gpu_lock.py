"""requirements/gpu-lock.txt pins every package of the GPU stack to versions that all of them accept."""

import copy
import re
from pathlib import Path

import lock_gpu
import pytest
from lock_gpu import Lock
from packaging.requirements import Requirement

FILES = [*lock_gpu.RESOLVED, lock_gpu.TRANSFORMER_ENGINE]
ROOTS = lock_gpu.roots(*FILES)


@pytest.fixture
def lock() -> Lock:
    return Lock.read()


def test_every_requirement_of_every_package_is_met(lock):
    """155 packages had no pin, and CUDA's compiler and headers came from a newer release than torch's
    CUDA.
    """
    assert lock.problems(ROOTS) == []
    assert sum(len(own.requires) for own in lock.packages.values()) > 500


def test_the_two_files_hold_the_same_versions(lock):
    lines = [line for line in lock_gpu.LOCK.read_text("utf-8").splitlines() if not line.startswith("#")]
    assert lines == [f"{name}=={own.version}" for name, own in lock.packages.items()]
    for name, own in lock.packages.items():
        assert name in lock_gpu.SOURCE_ONLY or (
            own.wheel.endswith(".whl") and re.fullmatch("[0-9a-f]{64}", own.sha256)
        )


def test_what_this_project_requires_is_locked(lock):
    text = Path("setup.py").read_text("utf-8")
    declared = [
        Requirement(line)
        for line in re.findall(r'^\s+"([\w-]+[>=]=?[\d.]+|numpy|psutil|tqdm|xxhash|zstandard)",', text, re.M)
    ]
    assert len(declared) >= 10
    assert lock.problems([*ROOTS, *declared]) == []


def test_nothing_is_locked_that_nobody_needs(lock):
    assert lock.extras(ROOTS).keys() | {root.name for root in ROOTS} >= lock.packages.keys()


@pytest.mark.parametrize(
    ("package", "version", "says"),
    [
        # The releases that pip chose before they were pinned.
        ("nvidia-cuda-nvcc", "13.5.37", "cuda-toolkit needs nvidia-cuda-nvcc==13.0.88.*"),
        ("nvidia-nvvm", "13.5.37", "cuda-toolkit needs nvidia-nvvm==13.0.88.*"),
        ("nvidia-cuda-crt", "13.5.37", "cuda-toolkit needs nvidia-cuda-crt==13.0.88.*"),
        ("nvidia-cuda-cccl", "13.3.5.0.6", "cuda-toolkit needs nvidia-cuda-cccl==13.0.85.*"),
        # What a file in requirements/, or another package, pins.
        ("torch", "2.13.0", "requirements needs torch==2.11.0, but 2.13.0 is locked"),
        ("cuda-bindings", "13.4.4", "cuda-python needs cuda-bindings~=13.0.3"),
        ("triton", "3.7.1", "torch needs triton==3.6.0"),
        ("nvidia-cudnn-cu13", "9.13.0.50", "torch needs nvidia-cudnn-cu13==9.19.0.56"),
        (
            "transformer-engine-cu13",
            "2.12.0",
            "transformer-engine-torch needs transformer_engine_cu13==2.11.0",
        ),
        # Needed through an extra of another package alone: cuda-toolkit[cublas] of torch.
        ("nvidia-cublas", "13.5.0.1", "cuda-toolkit needs nvidia-cublas==13.1.0.3.*"),
    ],
)
def test_another_version_is_noticed(lock, package, version, says):
    lock.packages[package].version = version
    assert any(says in problem for problem in lock.problems(ROOTS))


@pytest.mark.parametrize(
    ("pythons", "says"),
    [
        (">=3.12", "Python 3.11"),
        ("<3.12", "Python 3.12"),
        ("!=3.11.*", "Python 3.11"),
        (">=3.13", "Python 3.11"),
        ("~=3.10.0", "Python 3.12"),
    ],
)
def test_a_version_that_one_of_the_pythons_cannot_have_is_noticed(lock, pythons, says):
    """networkx 3.7, which pip chose for 3.12, does not exist for 3.11, which `make install-gpu` looks for
    first.
    """
    lock.packages["networkx"].pythons = pythons
    assert any("networkx" in problem and says in problem for problem in lock.problems(ROOTS))


@pytest.mark.parametrize(
    "package", ["nvidia-cufft", "ray", "pydantic-core", "importlib-metadata", "antlr4-python3-runtime"]
)
def test_a_missing_package_is_noticed(lock, package):
    del lock.packages[package]
    assert any(problem.endswith("which is not locked") for problem in lock.problems(ROOTS))


def test_what_does_not_hold_on_the_target_is_not_asked_for(lock):
    problems = lock.problems(
        [
            *ROOTS,
            Requirement('pywin32; sys_platform == "win32"'),
            Requirement('tomli; python_version < "3.11"'),
        ]
    )
    assert problems == []
    assert lock.problems([*ROOTS, Requirement("torch[optree]")]) == [
        "torch[optree] is needed, but was not when the lock was made"
    ]


def test_a_written_lock_reads_the_same(lock, tmp_path):
    before = copy.deepcopy(lock)
    lock.write(tmp_path / "lock.txt", tmp_path / "lock.json")
    assert Lock.read(tmp_path / "lock.json") == before
    assert (tmp_path / "lock.json").read_text() == lock_gpu.DETAILS.read_text()
    assert (tmp_path / "lock.txt").read_text() == lock_gpu.LOCK.read_text()


def test_no_address_of_an_index_is_in_the_lock():
    for path in (lock_gpu.LOCK, lock_gpu.DETAILS):
        assert "//" not in path.read_text("utf-8")
