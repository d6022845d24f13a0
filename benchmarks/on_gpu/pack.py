"""Make a pack that brings this project up on one GPU of a machine without a network.

    python benchmarks/on_gpu/pack.py [--dry-run] OUT [--image have.txt] [--architecture 90] [--trained FOLDER]
        [--pip ...]

The machine is assumed to have Python 3.12, torch 2.11 for CUDA 13, nvcc, and the packages that --image lists.
OUT then contains everything else, in parts of at most 60 MB: this project, the necessary wheels of
requirements/gpu-lock.txt, with code for one GPU architecture, and the scripts. Copy OUT to the machine and
run its four scripts in this order: 1-bring-up.sh, 2-speed.sh, 3-precision.sh, 4-engine.sh (`bash SCRIPT
RESULTS`). Each ends within ten minutes. call.py --help describes RESULTS. The pack lacks Ray and SGLang's
FlashAttention kernels; what needs them is not run.

--dry-run downloads nothing. It lists parts, sizes and scripts. With OUT, it then runs the steps of all
scripts on this CPU, with TransformerEngine's kernels emulated and without the packages that neither the pack
nor the image has. --trained FOLDER names a small HF model with trained weights, on which the error of FP8 is
measured.
"""

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import NamedTuple

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

from lock_gpu import Lock, Locked

from on_gpu.call import CALLS
from on_gpu.thin import rewrite_wheel, thinned

HERE = Path(__file__).resolve().parent
PROJECT = HERE.parents[1]
PART_BYTES = 60_000_000
IMAGE = HERE / "image.txt"
# {file: bytes} of the last pack that was made. A dry run reads the sizes from here.
SIZES = HERE / "sizes.json"


class Bundle(NamedTuple):
    """A set of packages that are unpacked together."""

    packages: tuple[str, ...]
    """Packages that are included with everything that they require."""
    alone: tuple[str, ...]
    """Packages that are included without their requirements, of which they import only a few here."""


BUNDLES = {
    "training": Bundle(
        (
            "megatron-core",
            "omegaconf",
            "zstandard",
            "xxhash",
            "psutil",
            "ruamel-yaml",
            "safetensors",
            "pyarrow",
            "tensorboard",
            "math-verify",
            "pytest",
            "pytest-timeout",
            "hypothesis",
            "importlib-metadata",
            "pydantic",
            "einops",
            "onnx",
            "onnxscript",
        ),
        ("transformer-engine", "transformer-engine-cu13", "transformer-engine-torch"),
    ),
    "engine": Bundle(
        (
            "aiohttp",
            "apache-tvm-ffi",
            "compressed-tensors",
            "dill",
            "fastapi",
            "gguf",
            "ipython",
            "loguru",
            "msgspec",
            "openai",
            "orjson",
            "partial-json-parser",
            "prometheus-client",
            "pybase64",
            "python-multipart",
            "pyzmq",
            "setproctitle",
            "soundfile",
            "transformers",
            "uvicorn",
            "uvloop",
            "xgrammar",
        ),
        ("sglang", "sglang-kernel", "sgl-deep-gemm", "flashinfer-python", "torch-memory-saver"),
    ),
}
# {package: files with code for several GPU architectures, of which only one is kept}
_THINNED = {"transformer-engine-cu13": r".*/libtransformer_engine\.so"}
# {package: files that are left out}. ARCHITECTURE stands for the GPU's.
_LEFT_OUT = {"sglang-kernel": r"sgl_kernel/(flash_ops\.abi3\.so|sm(?!ARCHITECTURE/)\d+/.*)"}


class Image:
    """The packages that the machine has, {name: version}. A version of None accepts any demand."""

    def __init__(self, path: Path):
        lines = [line.split("#")[0].strip() for line in path.read_text(encoding="utf-8").splitlines()]
        rows = (line.partition("==") for line in lines if line and not line.startswith("-e"))
        # `pip list` writes torch's version with the CUDA release behind a plus sign.
        self.versions = {
            canonicalize_name(name): version.partition("+")[0] or None for name, _, version in rows
        }

    def satisfies(self, demand: Requirement) -> bool:
        name = canonicalize_name(demand.name)
        version = self.versions.get(name)
        return name in self.versions and (
            version is None or demand.specifier.contains(version, prereleases=True)
        )


def contents(lock: Lock, image: Image) -> dict[str, list[str]]:
    """Return {bundle: its packages}, without those that the image has in a fitting version."""
    found: dict[str, list[str]] = {}
    taken: set[str] = set()
    for bundle, wanted in BUNDLES.items():
        chosen = set(wanted.alone)
        waiting = [Requirement(name) for name in wanted.packages]
        # Listed packages, with the version ranges that the packages in `alone` demand.
        waiting += [
            demand
            for name in wanted.alone
            for demand in _demands(lock, name)
            if canonicalize_name(demand.name) in wanted.packages
        ]
        while waiting:
            demand = waiting.pop()
            name = canonicalize_name(demand.name)
            if name in chosen or name in taken or image.satisfies(demand):
                continue
            if name not in lock.packages:
                raise SystemExit(
                    f"{name}, which the part {bundle} needs, is not in requirements/gpu-lock.txt"
                )
            chosen.add(name)
            waiting += _demands(lock, name)
        found[bundle] = sorted(chosen - taken)
        taken |= chosen
    return found


def _demands(lock: Lock, name: str) -> list[Requirement]:
    return [
        demand
        for demand in map(Requirement, lock.packages[name].requires)
        if lock.applies(demand, lock.packages[name].extras)
    ]


def file_of(own: Locked, name: str) -> str:
    """Return the name of a package's wheel, or of its source archive if it has no wheel."""
    return own.wheel or f"{name.replace('-', '_')}-{own.version}.tar.gz"


def download(lock: Lock, names: list[str], folder: Path, pip_arguments: list[str]) -> None:
    """Download packages for Python 3.12 on Linux x86-64.

    Raises SystemExit if a wheel is not the locked one.
    """
    pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(folder), *pip_arguments]
    platforms = [f"manylinux_2_{minor}_x86_64" for minor in range(35, 4, -1)] + [
        "manylinux2014_x86_64",
        "manylinux1_x86_64",
    ]
    target = [
        "--python-version",
        "3.12",
        "--implementation",
        "cp",
        *(f"--platform={name}" for name in platforms),
    ]
    pins = {name: f"{name}=={lock.packages[name].version}" for name in names}
    wheels = [pin for name, pin in pins.items() if lock.packages[name].wheel]
    subprocess.run([*pip, "--only-binary", ":all:", *target, *wheels], check=True)
    with tempfile.TemporaryDirectory() as shim:
        # pip runs the setup.py of TransformerEngine's extension to learn the package's name, and that asks
        # torch for its CUDA release.
        Path(shim, "sitecustomize.py").write_text('import torch.version\n\ntorch.version.cuda = "13.0"\n')
        for name in set(names) - {name for name in names if lock.packages[name].wheel}:
            command = [*pip, "--no-build-isolation", "--no-binary", ":all:", pins[name]]
            subprocess.run(command, check=True, env=os.environ | {"PYTHONPATH": shim})
    for name in names:
        own, path = lock.packages[name], folder / file_of(lock.packages[name], name)
        if own.sha256 and _digest(path.read_bytes()) != own.sha256:
            raise SystemExit(f"{path.name} has another SHA-256 than in requirements/gpu-lock.json")


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def make_small(name: str, wheel: Path, architecture: int) -> None:
    """Replace a wheel by one with code for one GPU architecture and without unneeded files."""
    thin, left_out = _THINNED.get(name), _LEFT_OUT.get(name, "").replace("ARCHITECTURE", str(architecture))
    if not thin and not left_out:
        return

    def change(file: str, content: bytes) -> bytes:
        return thinned(content, architecture)[0] if thin and re.fullmatch(thin, file) else content

    small = wheel.with_suffix(".small")
    rewrite_wheel(wheel, small, lambda file: not (left_out and re.fullmatch(left_out, file)), change)
    small.replace(wheel)


def project_files() -> list[str]:
    """Return the files of this project that git tracks or would track."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=PROJECT, check=True, capture_output=True, text=True).stdout.split(
        "\0"
    )
    return [name for name in listed if name and (PROJECT / name).is_file()]


def write_bundle(bundle: str, wheels: Path, trained: Path | None, target: Path) -> None:
    with tarfile.open(target, "w") as archive:
        for path in sorted(wheels.iterdir()):
            archive.add(path, f"wheels/{bundle}/{path.name}")
        if bundle != "training":
            return
        for name in project_files():
            archive.add(PROJECT / name, f"project/{name}")
        archive.add(HERE / "stubs", "stubs")
        if trained:
            archive.add(trained, "trained")


def split(bundle: str, whole: Path, out: Path) -> list[dict]:
    """Cut a file into parts. Return their names, sizes and digests, and remove the file."""
    parts = []
    with whole.open("rb") as file:
        while content := file.read(PART_BYTES):
            name = f"{bundle}.{len(parts) + 1}"
            (out / name).write_bytes(content)
            parts.append({"name": name, "bytes": len(content), "sha256": _digest(content)})
    whole.unlink()
    return parts


def scripts() -> dict[str, str]:
    """Return {file: its text} of the four scripts."""
    return {
        f"{number}-{name}.sh": f"#!/bin/bash\n# {call.title[0].upper()}{call.title[1:]}. "
        f"Usage: bash {number}-{name}.sh RESULTS\n"
        f'exec python3 "$(dirname "$0")/call.py" {name} "${{1:?name a folder for results}}" "${{@:2}}"\n'
        for number, (name, call) in enumerate(CALLS.items(), 1)
    }


def expected_parts(lock: Lock, chosen: dict[str, list[str]]) -> dict[str, list[dict]]:
    """Return what `split` would return, by the recorded sizes.

    Raise SystemExit for a file that no pack had yet.
    """
    sizes = json.loads(SIZES.read_text(encoding="utf-8"))
    found = {}
    for bundle, names in chosen.items():
        files = [file_of(lock.packages[name], name) for name in names]
        if unknown := [file for file in files if file not in sizes]:
            raise SystemExit(
                f"the size of {', '.join(unknown)} is not known: make the pack once without --dry-run"
            )
        total = sum(sizes[file] for file in files)
        if bundle == "training":
            total += sum((PROJECT / name).stat().st_size + 512 for name in project_files())
        lengths = [min(PART_BYTES, total - start) for start in range(0, total, PART_BYTES)]
        found[bundle] = [
            {"name": f"{bundle}.{number}", "bytes": length} for number, length in enumerate(lengths, 1)
        ]
    return found


def show(lock: Lock, chosen: dict[str, list[str]], parts: dict[str, list[dict]]) -> None:
    sizes = json.loads(SIZES.read_text(encoding="utf-8"))
    for bundle, names in chosen.items():
        print(
            f"{bundle}: "
            + ", ".join(f"{part['name']} {part['bytes'] / 1e6:.1f} MB" for part in parts[bundle])
        )
        for name in sorted(names, key=lambda name: -sizes[file_of(lock.packages[name], name)]):
            own = lock.packages[name]
            print(f"    {sizes[file_of(own, name)] / 1e6:8.2f} MB  {name} {own.version}")
    for (file, _), call in zip(scripts().items(), CALLS.values(), strict=True):
        print(f"{file}: {call.title} (parts of {', '.join(call.bundles)})")
        for step in call.steps:
            print(f"    {step.seconds:8} s   {step.name}")


def make(lock: Lock, chosen: dict[str, list[str]], given: argparse.Namespace) -> dict[str, list[dict]]:
    """Write the pack. Return {bundle: its parts}."""
    given.out.mkdir(parents=True, exist_ok=True)
    sizes, parts = {}, {}
    for bundle, names in chosen.items():
        with tempfile.TemporaryDirectory(dir=given.out) as folder:
            wheels = Path(folder, "wheels")
            download(lock, names, wheels, given.pip)
            for name in names:
                path = wheels / file_of(lock.packages[name], name)
                make_small(name, path, given.architecture)
                sizes[path.name] = path.stat().st_size
            whole = Path(folder, "whole")
            write_bundle(bundle, wheels, given.trained, whole)
            parts[bundle] = split(bundle, whole, given.out)
    for file, text in scripts().items():
        (given.out / file).write_text(text, encoding="utf-8")
    (given.out / "call.py").write_bytes((HERE / "call.py").read_bytes())
    content = {"architecture": given.architecture, "bundles": parts}
    (given.out / "parts.json").write_text(json.dumps(content, indent=1), encoding="utf-8")
    SIZES.write_text(json.dumps(dict(sorted(sizes.items())), indent=1) + "\n", encoding="utf-8")
    return parts


def rehearse(image: Image, chosen: dict[str, list[str]], out: Path, only: list[str]) -> int:
    """Run the scripts' steps on this CPU, with results in a folder for each, and return the exit status."""
    packages = out / "packages.txt"
    out.mkdir(parents=True, exist_ok=True)
    names = {*image.versions, *(name for bundle in chosen.values() for name in bundle)}
    packages.write_text("\n".join(sorted(names)), encoding="utf-8")
    status = 0
    for name in only:
        print(f"\n{name}", flush=True)
        command = [
            sys.executable,
            str(HERE / "call.py"),
            name,
            str(out / name),
            "--home",
            str(out / "home"),
            "--dry-run",
        ]
        status |= subprocess.run(
            command, env=os.environ | {"GRPO_PACK_PACKAGES": str(packages.resolve())}
        ).returncode
    return status


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, nargs="?", metavar="OUT", help="folder to write the pack to")
    parser.add_argument(
        "--dry-run", action="store_true", help="list the contents; with OUT, also run the steps on this CPU"
    )
    parser.add_argument(
        "--only", nargs="+", choices=CALLS, default=list(CALLS), help="scripts whose steps a dry run runs"
    )
    parser.add_argument(
        "--image",
        type=Path,
        default=IMAGE,
        help="packages of the machine, as `pip list --format=freeze` prints them",
    )
    parser.add_argument(
        "--architecture", type=int, default=90, help="compute capability without the point (%(default)s)"
    )
    parser.add_argument(
        "--trained", type=Path, metavar="FOLDER", help="a small HF model with trained weights"
    )
    parser.add_argument(
        "--pip", nargs=argparse.REMAINDER, default=[], help="arguments of pip, after all others"
    )
    given = parser.parse_args()
    lock, image = Lock.read(), Image(given.image)
    chosen = contents(lock, image)
    if given.dry_run:
        show(lock, chosen, expected_parts(lock, chosen))
        return rehearse(image, chosen, given.out, given.only) if given.out else 0
    if given.out is None:
        parser.error("give a folder for the pack, or --dry-run")
    show(lock, chosen, make(lock, chosen, given))
    return 0


if __name__ == "__main__":
    sys.exit(main())
