"""Run one call of the bring-up pack on a machine without a network.

    python3 call.py bring-up|speed|precision|engine RESULTS [--home FOLDER] [--dry-run]

A call unpacks the parts that it needs and then runs its steps, each with its own time limit. The script lies
in the pack beside parts.json and needs only Python. Parts that an earlier call unpacked stay in --home. On a
fresh machine, a folder `built` beside parts.json, with the wheel that the first call left in RESULTS, saves
its compilation.

RESULTS receives the output of each step (NAME.log), JUnit files, JSON files, and summary.json. The latter is
rewritten after each step, so that a call that is ended from outside leaves the results of the steps before.

--dry-run runs the same steps on a CPU, with the packages of this interpreter and the project's folder instead
of the parts.
"""

import argparse
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import tarfile
import time
from pathlib import Path
from typing import NamedTuple

# A call ends by itself within ten minutes.
CALL_SECONDS = 570
# Time after SIGINT, in which pytest still writes its JUnit file.
_GRACE_SECONDS = 15
_SHOWN_LINES = 25
# Time limits of a dry run are longer, because its CPU is slower and has other work.
_DRY_RUN_FACTOR = 3
_PYTEST = (
    "{python} -m pytest -p no:cacheprovider -o addopts= --strict-markers --timeout 120 -q "
    "--junitxml {results}/{name}.xml"
)
_DRY_BENCHMARK = "{python} benchmarks/gpu.py --dry-run"
# The benchmark ends by itself before the step's time limit, with its figures as one JSON object.
_BENCHMARK = "{python} benchmarks/gpu.py --minutes {minutes:.2f}"


class Step(NamedTuple):
    """One command of a call."""

    name: str
    """Name of its log, such as "tests"."""
    seconds: int
    """Time limit."""
    command: str
    """Shell command, run in the project's folder. `run` fills in fields such as {python}."""
    dry_command: str | None = None
    """The same for a CPU. None: the step is skipped."""
    required: bool = False
    """True if the rest of the call is useless without this step."""


class Call(NamedTuple):
    """One script.

    title: what the script finds out.
    bundles: names of the bundles that must be unpacked first.
    """

    title: str
    bundles: tuple[str, ...]
    steps: tuple[Step, ...]


_EXTENSION = (
    'test -n "$(ls {wheels}/built/transformer_engine_torch-*.whl 2>/dev/null)" || '
    "NVTE_PYTORCH_FORCE_BUILD=TRUE {python} -m pip wheel -q --no-index --no-deps --no-build-isolation "
    "-w {wheels}/built "
    "{wheels}/training/transformer_engine_torch-*.tar.gz && cp {wheels}/built/*.whl {results}/ && "
    # Not with pip, which would replace the whole folder transformer_engine by the few files of this wheel.
    "{python} -m zipfile -e {wheels}/built/transformer_engine_torch-*.whl {site}"
)
_PRODUCTS = (
    "for precision in PRECISIONS; do {python} -c "
    '"import sys; from grpo_megatron.commands import probes; print(probes.matrix_product(sys.argv[1]))" '
    "$precision || exit 1; done"
)
_COMPILE = Step("compile", 240, _EXTENSION)
_IMPORT = Step(
    "transformer_engine",
    60,
    '{python} -c "import transformer_engine.pytorch as te; print(te.__file__)"',
    '{python} -c "from grpo_megatron.megatron.without_gpu import emulation; emulation.install(); '
    'import transformer_engine.pytorch"',
    required=True,
)

CALLS = {
    "bring-up": Call(
        "the machine, whether its packages fit together, and the tests",
        ("training",),
        (
            Step(
                "machine",
                60,
                "nvidia-smi; df -h . /dev/shm; nvcc --version; c++ --version; {python} -m pip list; "
                "{python} -m torch.utils.collect_env",
                "{python} -m pip list",
            ),
            _COMPILE,
            _IMPORT,
            Step(
                "products",
                120,
                _PRODUCTS.replace("PRECISIONS", "fp32 bf16 fp8"),
                _PRODUCTS.replace("PRECISIONS", "fp32 bf16"),
            ),
            Step(
                "tests",
                400,
                f'{_PYTEST} tests/gpu -m gpu -k "not loop and not doctor and not host_memory"',
                f'{_PYTEST} tests/gpu -k "emulated and (training or logprobs) and '
                '(qwen3-emulated or weights_come_out)"',
            ),
        ),
    ),
    "speed": Call(
        "how fast the trainer is: matrix products, training, head, export, hand-over, sleep",
        ("training",),
        (
            _COMPILE,
            _IMPORT,
            Step(
                "speed",
                500,
                f"{_BENCHMARK} --only peak training-8b head export handover sleep",
                f"{_DRY_BENCHMARK} --only peak head export handover sleep",
            ),
        ),
    ),
    "precision": Call(
        "FP8 by recipe: time and error; local layers with grouped queries; whether a run repeats bit for bit",
        ("training",),
        (
            _COMPILE,
            _IMPORT,
            Step("repeat", 120, f"{_BENCHMARK} --only repeat", f"{_DRY_BENCHMARK} --only repeat"),
            Step(
                "precision",
                300,
                f"{_BENCHMARK} --only training-0.6b training-4b fp8_error {{trained}}",
                f"{_DRY_BENCHMARK} --only fp8_error {{trained}}",
            ),
            Step(
                "local_layers",
                120,
                f'{_PYTEST} tests/gpu/test_smoke.py -m gpu -k "cuda-local and logprobs"',
                f'{_PYTEST} tests/gpu/test_smoke.py -k "emulated and fp8_is_near and tensorwise"',
            ),
        ),
    ),
    "engine": Call(
        "an engine without Ray: start, log-probs, release, weights from another process, "
        "probe; and the prefill graph",
        ("training", "engine"),
        (
            Step(
                "imports",
                90,
                '{python} -c "import sglang.srt.entrypoints.engine"',
                '{python} -c "import sglang.srt.entrypoints.engine"',
                required=True,
            ),
            Step("kernels", 90, '{python} -c "import sgl_kernel, deep_gemm, flashinfer"'),
            Step("doctor", 120, "{python} -m grpo_megatron.cli doctor"),
            Step(
                "engine",
                240,
                "{python} benchmarks/on_gpu/engine.py {results}/engine.json",
                "{python} benchmarks/on_gpu/engine.py {results}/engine.json --dry-run",
            ),
            Step(
                "prefill_graph",
                150,
                "{python} benchmarks/on_gpu/engine.py {results}/prefill_graph.json --prefill-graph",
            ),
        ),
    ),
}


class Pack:
    """The folder of parts, and the folder where they are unpacked.

    In the latter, a file NAME.done records the digests of the parts of each bundle that is unpacked.
    """

    def __init__(self, folder: Path, home: Path, dry_run: bool):
        self.folder, self.home, self.dry_run = folder, home, dry_run
        self.project = folder.parents[1] if dry_run else home / "project"
        self.wheels, self.site = home / "wheels", home / "site"

    def unpack(self, bundle: str) -> None:
        """Join, check and unpack a bundle's parts, and install its wheels.

        Raises SystemExit if a part is missing or damaged.
        """
        if self.dry_run:
            return
        described = json.loads((self.folder / "parts.json").read_text(encoding="utf-8"))["bundles"][bundle]
        done = self.home / f"{bundle}.done"
        if done.exists() and done.read_text() == json.dumps(described):
            return
        self.home.mkdir(parents=True, exist_ok=True)
        joined = self.home / f"{bundle}.tar"
        with joined.open("wb") as whole:
            for part in described:
                whole.write(self._part(part))
        with tarfile.open(joined) as archive:
            archive.extractall(self.home, filter="data")
        joined.unlink()
        if (self.folder / "built").exists():
            shutil.copytree(self.folder / "built", self.wheels / "built", dirs_exist_ok=True)
        wheels = sorted(map(str, (self.wheels / bundle).glob("*.whl")))
        pip = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "-q",
            "--no-index",
            "--no-deps",
            "--no-compile",
            "--upgrade",
        ]
        subprocess.run([*pip, "--target", str(self.site), *wheels], check=True)
        done.write_text(json.dumps(described))

    def _part(self, part: dict) -> bytes:
        path = self.folder / part["name"]
        if not path.exists():
            sys.exit(f"{path} is missing, but this script needs it: copy it to the other parts")
        content = path.read_bytes()
        if hashlib.sha256(content).hexdigest() != part["sha256"]:
            sys.exit(f"{path} is damaged: its SHA-256 is not that of parts.json; copy it again")
        return content

    def environment(self) -> dict[str, str]:
        """Return the environment variables of every step."""
        if self.dry_run:
            only = self.folder / "only"
            return {"PYTHONPATH": os.pathsep.join(map(str, (only, self.folder / "stubs", self.project)))}
        nvidia = Path(sysconfig.get_path("purelib"), "nvidia")
        headers = [str(nvidia / name / "include") for name in ("cu13", "cudnn", "nccl")]
        paths = {
            "PYTHONPATH": [str(self.site), str(self.project), str(self.home / "stubs")],
            "PATH": [str(self.site / "bin"), str(Path(sys.executable).parent), os.environ.get("PATH", "")],
            # torch_memory_saver is preloaded and needs CUDA's libraries before torch loads its own.
            "LD_LIBRARY_PATH": [str(nvidia / "cu13" / "lib"), os.environ.get("LD_LIBRARY_PATH", "")],
            "LIBRARY_PATH": [str(nvidia / "cu13" / "lib")],
            "CPATH": headers,
        }
        return {name: os.pathsep.join(filter(None, values)) for name, values in paths.items()}


class Results:
    """The file summary.json, and the printed lines."""

    def __init__(self, folder: Path, call: str):
        self.folder, self.steps = folder, {}
        self._call = call
        folder.mkdir(parents=True, exist_ok=True)

    def add(self, step: str, status: str, seconds: float, log: Path | None = None) -> None:
        self.steps[step] = {"status": status, "seconds": round(seconds, 1)}
        print(f"{step:<20}{status:<12}{seconds:7.1f} s", flush=True)
        if log and status != "ok":
            lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-_SHOWN_LINES:]
            print("".join(f"    {line}\n" for line in lines), end="", flush=True)
        content = {"call": self._call, "steps": self.steps, "failed": self.failed}
        (self.folder / "summary.json").write_text(json.dumps(content, indent=1), encoding="utf-8")

    @property
    def failed(self) -> list[str]:
        return [name for name, step in self.steps.items() if step["status"] not in ("ok", "skipped")]


def run(step: Step, command: str, pack: Pack, results: Results, seconds: float) -> bool:
    """Run a step and return True if it succeeded.

    When its time is up it gets SIGINT, and it is killed if that does not end it.
    """
    log, started = results.folder / f"{step.name}.log", time.monotonic()
    fill = {
        "python": sys.executable,
        "results": results.folder,
        "wheels": pack.wheels,
        "site": pack.site,
        "name": step.name,
        "minutes": max(seconds - _GRACE_SECONDS, 1) / 60,
        "trained": f"--trained {pack.home}/trained" if (pack.home / "trained").exists() else "",
    }
    with log.open("w", encoding="utf-8") as output:
        process = subprocess.Popen(
            ["bash", "-c", command.format(**fill)],
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=pack.project,
            env=os.environ | {"PYTHONUNBUFFERED": "1"} | pack.environment(),
            start_new_session=True,
        )
        status = _wait(process, seconds)
    results.add(step.name, status, time.monotonic() - started, log)
    return status == "ok"


def _wait(process: subprocess.Popen, seconds: float) -> str:
    try:
        return "ok" if process.wait(seconds) == 0 else f"exit {process.returncode}"
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGINT)
        try:
            process.wait(_GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        return "timed out"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("call", choices=CALLS, help="call to run")
    parser.add_argument("results", type=Path, metavar="RESULTS", help="folder for logs and results")
    parser.add_argument(
        "--home",
        type=Path,
        default=Path.home() / "grpo-pack",
        help="folder to unpack parts to (default: %(default)s)",
    )
    parser.add_argument("--dry-run", action="store_true", help="run on a CPU, with the installed packages")
    given = parser.parse_args()
    started, call = time.monotonic(), CALLS[given.call]
    factor = _DRY_RUN_FACTOR if given.dry_run else 1
    results = Results(given.results.resolve(), given.call)
    pack = Pack(Path(__file__).resolve().parent, given.home.resolve(), given.dry_run)
    for bundle in call.bundles:
        unpacking = time.monotonic()
        pack.unpack(bundle)
        results.add(f"unpack {bundle}", "skipped" if given.dry_run else "ok", time.monotonic() - unpacking)
    missing = False
    for step in call.steps:
        command = step.dry_command if given.dry_run else step.command
        left = factor * CALL_SECONDS - _GRACE_SECONDS - (time.monotonic() - started)
        if command is None:
            results.add(step.name, "skipped", 0)
        elif missing or left < 1:
            results.add(step.name, "not run", 0)
        else:
            missing = (
                not run(step, command, pack, results, min(factor * step.seconds, left)) and step.required
            )
    print(f"results: {results.folder}; failed: {', '.join(results.failed) or 'nothing'}")
    return int(bool(results.failed))


if __name__ == "__main__":
    sys.exit(main())
