"""Measure everything on one GPU, in one command of at most nine minutes.

    python benchmarks/gpu.py [--only peak head ...] [--minutes 9] [--trained FOLDER] [--dry-run]

There are these sections. Each runs in its own process, so that none has the memory or the errors of another:

    peak             fastest bf16 matrix product, and a copy within the device's memory
    training-8b      Qwen3-8B with as many layers as fit: training step (tokens/s, MFU, peak memory) and
                     log-prob pass, in bf16 and, with TransformerEngine, in FP8. Packed batches like GSM8K,
                     and sequences of 8192 tokens; some 16,000 tokens per step in micro-batches of at most
                     8192. Also the five operations of a step that take longest
    training-4b, training-0.6b   the same for all layers of Qwen3-4B and Qwen3-0.6B
    head             our head against logits + log_softmax, and against Megatron's vocabulary-parallel cross
                     entropy: time and memory
    export           all weights as HF tensors, against a copy of them
    handover         weights into the memory of another process on the same device
    sleep            five cycles of sleep and wake-up
    loop             three whole GRPO steps with an engine on the same device: start, sync, generation
    repeat           whether three training steps from the same weights give the same bits twice, in each
                     precision
    fp8_error        log-probs in FP8 against bf16 on a trained model (--trained: folder of an HF checkpoint)

Weights are random and in bf16, except in fp8_error. MFU is the model's FLOPs divided by the time and by the
bf16 rate that `peak` measured on the same card. The FLOPs are 6 per token and weight of a matrix product (2
in a log-prob pass), plus those of the causal pairs of attention. A section for which too little time is left
is skipped and named. A section that runs out of time is ended.

--dry-run runs the same code on a CPU, with tiny models and emulated TransformerEngine kernels. Its figures
mean nothing.

Prints each section's figures when it ends and, as its last line, one JSON object:

    dry_run, versions, seconds, section_seconds
    sections    {name: figures}; a failed section has the figures that it reached
    skipped     {name: reason}
    failed      {name: error}
    targets     {name: [measured or null, comparison, target, whether it is met]}

The exit status is 1 if a section failed.
"""

import argparse
import contextlib
import importlib
import importlib.util
import json
import multiprocessing
import operator
import sys
import time
import traceback
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tools"))

from on_gpu.bench import Bench, Options

from grpo_megatron.capabilities import start_method


class Section(NamedTuple):
    """A part of the benchmark that runs in a process of its own.

    function: module of on_gpu and function in it, such as "arithmetic.peak".
    seconds: time that must be left to begin the section on a GPU.
    arguments: further arguments of the function.
    packages: packages that must be installed.
    """

    function: str
    seconds: float
    arguments: tuple = ()
    packages: tuple = ("megatron",)


# The most important sections come first.
SECTIONS = {
    "peak": Section("arithmetic.peak", 20, packages=()),
    "training-8b": Section("training.shape", 90, ("qwen3-8b",)),
    "head": Section("arithmetic.head", 30),
    "export": Section("weights.export", 30),
    "handover": Section("weights.handover", 30, packages=()),
    "sleep": Section("weights.sleep", 40),
    "loop": Section("loop.steps", 90, packages=("megatron", "sglang", "ray")),
    "fp8_error": Section("training.fp8_error", 40),
    "training-0.6b": Section("training.shape", 40, ("qwen3-0.6b",)),
    "training-4b": Section("training.shape", 60, ("qwen3-4b",)),
    "repeat": Section("training.repeat", 60),
}
# (section, path within its figures, comparison, target), for one H200.
TARGETS = (
    ("training-8b", "bf16.long.mfu", ">=", 0.45),
    ("training-8b", "bf16.long.logprob_mfu", ">=", 0.55),
    ("training-8b", "fp8_tensorwise_over_bf16_long", ">=", 1.3),
    ("head", "time_over_log_softmax", "<=", 1.35),
    ("head", "memory_over_log_softmax", "<=", 0.1),
    ("export", "device_gb_per_s", ">=", 100.0),
    ("handover", "gb_per_s", ">=", 100.0),
    ("sleep", "left_asleep_gb", "<=", 2.0),
    ("sleep", "leak_gb", "<=", 0.1),
    ("fp8_error", "fp8_tensorwise.mean_difference", "<=", 0.02),
)
_MET = {">=": operator.ge, "<=": operator.le}


def run_section(name: str, options: Options, connection) -> None:
    """Run a section. This is the main function of the section's process.

    It sends ("figures", all figures so far) through `connection` whenever there are new ones, and at the end
    ("done", None) or ("failed", traceback).
    """
    try:
        section = SECTIONS[name]
        module, function = section.function.split(".")
        bench = Bench(options, lambda figures: connection.send(("figures", figures)))
        getattr(importlib.import_module(f"on_gpu.{module}"), function)(bench, *section.arguments)
        connection.send(("done", None))
    except Exception:
        connection.send(("failed", traceback.format_exc()))


class Runs:
    """Runs sections one after the other within a time limit, and keeps their results.

    figures: {section: its figures}
    skipped, failed: {section: reason}
    seconds: {section: duration}
    """

    def __init__(self, options: Options, minutes: float):
        self.options, self._deadline = options, time.monotonic() + 60 * minutes
        self.figures: dict[str, dict] = {}
        self.skipped: dict[str, str] = {}
        self.failed: dict[str, str] = {}
        self.seconds: dict[str, float] = {}
        self._context: Any = multiprocessing.get_context(start_method())

    def run(self, name: str) -> None:
        section, left = SECTIONS[name], self._deadline - time.monotonic()
        if left < (0 if self.options.dry_run else section.seconds):
            self.skipped[name] = f"it needs {section.seconds:.0f} s, but only {max(0, left):.0f} s are left"
            return
        if missing := [package for package in section.packages if importlib.util.find_spec(package) is None]:
            self.skipped[name] = f"not installed: {', '.join(missing)}"
            return
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=run_section, args=(name, self.options, theirs))
        started = time.monotonic()
        process.start()
        theirs.close()
        kind, value = self._last_word(name, ours)
        # A process that has reported its end exits by itself. Give it time to close what it opened.
        end(process, patience=0.0 if kind == "late" else 20.0)
        self.seconds[name] = time.monotonic() - started
        if kind != "done":
            self.failed[name] = value
        elif why := self.figures.get(name, {}).get("skipped"):
            self.skipped[name] = why
            del self.figures[name]
        if name == "peak":
            self.options = replace(self.options, peak_flops=self.figures.get(name, {}).get("bf16_flops"))

    def _last_word(self, name: str, connection) -> tuple[str, str | None]:
        """Receive figures of a section until its process has ended or the time limit is reached.

        Returns ("done", None), or ("failed", reason), or ("late", reason) after the time limit.
        """
        while connection.poll(max(0.0, self._deadline - time.monotonic())):
            try:
                kind, value = connection.recv()
            except EOFError:
                return "failed", "its process ended without a result"
            if kind != "figures":
                return kind, value
            self.figures[name] = value
        return "late", "it did not end within the time limit"

    def targets(self) -> dict[str, list]:
        """Return {"SECTION.PATH": [measured or None, comparison, target, whether the target is met]}.

        The last item is None if nothing was measured, and in a dry run.
        """
        found = {}
        for section, path, comparison, target in TARGETS:
            value: Any = self.figures.get(section, {})
            for key in path.split("."):
                value = value.get(key) if isinstance(value, dict) else None
            met = None if value is None or self.options.dry_run else _MET[comparison](value, target)
            found[f"{section}.{path}"] = [value, comparison, target, met]
        return found


def end(process, patience: float) -> None:
    """Wait for the process, and kill it with all its children if it still runs after `patience` seconds."""
    process.join(timeout=patience)
    if process.is_alive():
        family = [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]
        for one in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
        process.join()


def rows(figures: dict, prefix: str = "") -> list[tuple[str, Any]]:
    """Return nested figures as a flat list of (path, value), with paths such as `bf16.long.mfu`."""
    found = []
    for name, value in figures.items():
        found += rows(value, f"{prefix}{name}.") if isinstance(value, dict) else [(prefix + name, value)]
    return found


def show(name: str, runs: Runs) -> None:
    print(f"\n{name}" + (f", {runs.seconds[name]:.1f} s" if name in runs.seconds else ""))
    for path, value in rows(runs.figures.get(name, {})):
        if path == "slowest_operations":
            for one in value:
                print(
                    f"  {one['milliseconds']:>12.2f} ms{one['share']:>8.1%}"
                    f"{one['calls']:>8} x  {one['operation']}"
                )
        else:
            print(
                f"  {path:<56}{value:>14.6g}"
                if isinstance(value, int | float)
                else f"  {path:<56}{value!s:>14}"
            )
    for table, word in ((runs.skipped, "skipped"), (runs.failed, "FAILED")):
        if name in table:
            print(f"  {word}: {table[name]}", flush=True)


def prepare_dry_run() -> None:
    """Import the modules of all sections once, before the sections' processes are forked.

    This also limits torch to one thread and installs the emulation of GPU kernels.
    """
    import torch

    from grpo_megatron.megatron.without_gpu import emulation

    torch.set_num_threads(1)
    emulation.install()
    importlib.import_module("on_gpu.training")


def versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for package in ("torch", "megatron-core", "transformer_engine", "sglang"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = None
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only",
        nargs="+",
        choices=SECTIONS,
        help="run only these sections, and `peak`, with which the others are compared",
    )
    parser.add_argument("--minutes", type=float, default=9.0, help="time limit of all sections together")
    parser.add_argument("--trained", metavar="FOLDER", help="an HF model with trained weights, for fp8_error")
    parser.add_argument(
        "--dry-run", action="store_true", help="run on a CPU, with tiny sizes and emulated kernels"
    )
    given = parser.parse_args()
    started = time.monotonic()
    if given.dry_run:
        prepare_dry_run()
    runs = Runs(Options(given.dry_run, given.trained), given.minutes)
    for name in SECTIONS:
        if name == "peak" or given.only is None or name in given.only:
            runs.run(name)
            show(name, runs)
    result = {
        "dry_run": given.dry_run,
        "versions": versions(),
        "seconds": time.monotonic() - started,
        "section_seconds": runs.seconds,
        "sections": runs.figures,
        "skipped": runs.skipped,
        "failed": runs.failed,
        "targets": runs.targets(),
    }
    print(json.dumps(result))
    return int(bool(runs.failed))


if __name__ == "__main__":
    sys.exit(main())
