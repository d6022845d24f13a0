"""Write the versions of all packages that `make install-gpu` installs, for CPython 3.12 on Linux x86-64.

    .venv/bin/python tools/lock_gpu.py --python python3.12 [-- pip's arguments]

pip resolves requirements/gpu*.txt and test.txt for the interpreter that --python names, and installs nothing.
That interpreter needs no packages. Run the tool after a change of these files. It writes two files:

    requirements/gpu-lock.txt    NAME==VERSION of every package: pip's constraints in `make install-gpu`
    requirements/gpu-lock.json   the same, with each package's wheel, its SHA-256, and its requirements, which
                                 tests/unit/test_gpu_lock.py checks the versions against
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

REQUIREMENTS = Path(__file__).resolve().parents[1] / "requirements"
LOCK = REQUIREMENTS / "gpu-lock.txt"
DETAILS = REQUIREMENTS / "gpu-lock.json"
TRANSFORMER_ENGINE = "gpu-transformer-engine.txt"  # installed without its dependencies
RESOLVED = ("gpu-torch.txt", "gpu.txt", "test.txt")
# Packages without a wheel, which pip compiles against the environment's torch. The values are what their
# setup.py requires under CUDA 13.
SOURCE_ONLY = {
    "transformer-engine-torch": [
        "torch>=2.1",
        "einops",
        "onnxscript",
        "onnx",
        "packaging",
        "pydantic",
        "transformer_engine_cu13==2.11.0",
    ]
}
# `make install-gpu` accepts either version; the lock is made with the newer one.
PYTHONS = ("3.11", "3.12")
# Package whose extras name the components of one CUDA release.
TOOLKIT = "cuda-toolkit"
_HEADER = (
    "# Made by tools/lock_gpu.py: all packages of the GPU stack, for CPython 3.12 on "
    "Linux x86-64. Do not edit.\n"
)


@dataclass
class Locked:
    """A package of the GPU stack: its version, its wheel, and what it requires."""

    version: str
    """Exact version, such as "2.11.0"."""
    wheel: str
    """Name of the wheel's file; empty for a package that exists as source only."""
    sha256: str
    """Digest of the wheel, in hexadecimal digits; empty for a package that exists as source only."""
    requires: list[str]
    """`Requires-Dist` lines that apply on the target, with `extras`. For cuda-toolkit: all of them."""
    pythons: str = ""
    """`Requires-Python`, such as ">=3.10"."""
    extras: list[str] = field(default_factory=list)
    """Extras of the package that the requirements, or other packages, ask for."""


@dataclass
class Lock:
    """All packages of the GPU stack with their versions, the content of the two lock files.

    The target of the lock is CPython 3.12 on Linux x86-64.

    packages: {canonical name: package}.
    environment: values of the PEP 508 markers on the target, such as python_version.
    """

    packages: dict[str, Locked]
    environment: dict[str, str]

    @classmethod
    def read(cls, path: Path = DETAILS) -> "Lock":
        content = json.loads(path.read_text(encoding="utf-8"))
        return cls(
            {name: Locked(**fields) for name, fields in content["packages"].items()}, content["environment"]
        )

    def write(self, lines: Path = LOCK, details: Path = DETAILS) -> None:
        lines.write_text(
            _HEADER + "".join(f"{name}=={own.version}\n" for name, own in self.packages.items()),
            encoding="utf-8",
        )
        packages = ",\n".join(
            f"{json.dumps(name)}: {json.dumps(vars(own))}" for name, own in self.packages.items()
        )
        content = f'{{"environment": {json.dumps(self.environment)},\n"packages": {{\n{packages}\n}}}}\n'
        details.write_text(content, encoding="utf-8")

    def applies(self, requirement: Requirement, extras: Iterable[str] = ()) -> bool:
        """Return True if a requirement applies on the target, according to its PEP 508 marker.

        extras: the wanted extras of the package that has the requirement.
        """
        if requirement.marker is None:
            return True
        return any(
            requirement.marker.evaluate(self.environment | {"extra": extra}) for extra in ("", *extras)
        )

    def extras(self, roots: list[Requirement]) -> dict[str, set[str]]:
        """Return {package: extras of it that are needed}, for the packages that the project needs.

        Extras are needed if `roots` ask for them, or another package that is needed.

        roots: requirements of the project.
        """
        found: dict[str, set[str]] = defaultdict(set)
        waiting = [root for root in roots if self.applies(root)]
        seen: set[str] = set()
        while waiting:
            one = waiting.pop()
            name = canonicalize_name(one.name)
            if name not in self.packages or (name in seen and one.extras <= found[name]):
                continue
            seen.add(name)
            found[name] |= one.extras
            waiting += [
                needed
                for needed in map(Requirement, self.packages[name].requires)
                if self.applies(needed, found[name])
            ]
        return found

    def problems(self, roots: list[Requirement]) -> list[str]:
        """Return one line for each problem that would keep the packages from working together.

        A package may be missing, excluded by another package or by a Python version, or belong to another
        CUDA release.

        roots: requirements of the project.
        """
        extras, found = self.extras(roots), []
        demands = [("requirements", root) for root in roots if self.applies(root)]
        for name, own in self.packages.items():
            bad = [python for python in PYTHONS if not SpecifierSet(own.pythons).contains(python)]
            found += [f"{name} {own.version} is not for Python {python}" for python in bad]
            found += [
                f"{name}[{extra}] is needed, but was not when the lock was made"
                for extra in extras[name] - {*own.extras}
            ]
            needed = [Requirement(line) for line in own.requires]
            demands += [(name, one) for one in needed if self.applies(one, extras[name])]
            if name == TOOLKIT:
                demands += [(name, one) for one in needed if canonicalize_name(one.name) in self.packages]
        for who, demand in demands:
            own = self.packages.get(canonicalize_name(demand.name))
            if own is None:
                found.append(f"{who} needs {demand}, which is not locked")
            elif not demand.specifier.contains(own.version, prereleases=True):
                found.append(f"{who} needs {demand}, but {own.version} is locked")
        return list(dict.fromkeys(found))

    def drop_foreign_extras(self, roots: list[Requirement]) -> None:
        """Remove `Requires-Dist` lines that do not apply on the target, so that the lock stays short.

        All lines of cuda-toolkit are kept. This method also sets `extras` of each package, which decide which
        lines apply.

        roots: requirements of the project.
        """
        extras = self.extras(roots)
        for name, own in self.packages.items():
            own.extras = sorted(extras[name])
            own.requires = [
                line
                for line in own.requires
                if name == TOOLKIT or self.applies(Requirement(line), extras[name])
            ]


def roots(*files: str) -> list[Requirement]:
    """Return the requirements in some files of the folder requirements/, without lines such as `-r FILE`."""
    lines = [
        line.split("#")[0].strip()
        for file in files
        for line in (REQUIREMENTS / file).read_text("utf-8").splitlines()
    ]
    return [Requirement(line) for line in lines if line and not line.startswith("-")]


def resolve(python: str, arguments: list[str]) -> dict:
    """Return pip's report of what it would install for a Python interpreter. Nothing is installed.

    python: path or name of the interpreter.
    arguments: arguments of `pip install`.
    """
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        pip = [
            sys.executable,
            "-m",
            "pip",
            "--python",
            python,
            "install",
            "-q",
            "--dry-run",
            "--ignore-installed",
        ]
        # With fast-deps, pip reads only the metadata of most wheels, instead of gigabytes.
        pip += ["--use-feature=fast-deps", "--only-binary", ":all:", "--report", str(report)]
        subprocess.run([*pip, *arguments], check=True, cwd=REQUIREMENTS)
        return json.loads(report.read_text(encoding="utf-8"))


def locked(report: dict) -> dict[str, Locked]:
    """Return {canonical name: package} from pip's report, with all `Requires-Dist` lines of each package."""
    found = {}
    for item in report["install"]:
        metadata, download = item["metadata"], item["download_info"]
        wheel = download["url"].rpartition("/")[2]
        digest = download["archive_info"]["hashes"]["sha256"]
        own = Locked(
            metadata["version"],
            wheel,
            digest,
            metadata.get("requires_dist", []),
            metadata.get("requires_python", ""),
        )
        found[canonicalize_name(metadata["name"])] = own
    return found


def make(python: str, pip_arguments: list[str]) -> Lock:
    """Resolve all packages of the GPU stack with pip, and return them as a lock. Nothing is installed.

    python: path or name of an interpreter. This process ends with an error message if it is not Python 3.12
        on Linux x86-64.
    pip_arguments: further arguments of pip.
    """
    files = [argument for file in RESOLVED for argument in ("-r", file)]
    report = resolve(python, [*files, *pip_arguments])
    environment = report["environment"]
    target = environment["python_version"], environment["sys_platform"], environment["platform_machine"]
    if target != ("3.12", "linux", "x86_64"):
        sys.exit(
            f"the lock is for CPython 3.12 on Linux x86-64, but {python} is "
            f"{target}: give another interpreter with --python"
        )
    alone = roots(TRANSFORMER_ENGINE)
    wheels = [str(one) for one in alone if canonicalize_name(one.name) not in SOURCE_ONLY]
    packages = locked(report) | locked(resolve(python, ["--no-deps", *wheels, *pip_arguments]))
    for one in alone:
        (pin,), name = one.specifier, canonicalize_name(one.name)
        if name in SOURCE_ONLY:
            packages[name] = Locked(pin.version, "", "", SOURCE_ONLY[name])
    # The release and build of the kernel are no properties of the target.
    kept = {
        name: value
        for name, value in environment.items()
        if name not in ("platform_release", "platform_version")
    }
    return Lock(dict(sorted(packages.items())), kept)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--python", required=True, help="CPython 3.12, by path or by name")
    parser.add_argument("pip", nargs="*", metavar="pip's arguments", help="arguments for pip, after --")
    given = parser.parse_args()
    lock, wanted = make(given.python, given.pip), roots(*RESOLVED, TRANSFORMER_ENGINE)
    lock.drop_foreign_extras(wanted)
    if problems := lock.problems(wanted):
        print("\n".join(problems), file=sys.stderr)
        return 1
    lock.write()
    print(f"{len(lock.packages)} packages in {LOCK} and {DETAILS}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
