"""Measure the conversion HF -> Megatron -> HF of 2 billion parameters, against copying the files.

    python benchmarks/convert.py [--layers N] [--processes N] [--repeats N] [--folder DIR]

The checkpoint is a Qwen3 of random bf16 weights in shards of 1 GiB (hidden 2048, 28 layers, vocabulary
151,936, untied: 2.03 billion parameters). It is made in a temporary folder of DIR and needs 17 GB of disk.

Then two things are done in turn. The weight files are copied, each synced to disk before the next, which is
the least that any conversion must do. And the tools convert the checkpoint in both directions, as programs.
The files have been read before, so that neither side waits for the disk to read. GB/s of the conversions are
those that the tools print, which leave out their start-up (imports, processes, the model's layout). While
they run, the anonymous resident memory of each process is read every 5 ms. From its peak, the memory of a
process with the same imports is subtracted.

Both sides write into memory of the same state. On a virtual machine that returns free memory to its host, the
kernel has to get that memory back for a new file, which takes several times as long as the copying itself.
Therefore a spare copy of the weights is deleted just before each side begins to write, and the side writes
into its memory. `fresh_copy` is copying without that.

Prints a table and, as its last line, one JSON object:

    speed_over_copy                         GB/s of the slower direction over the copy's, medians
    extra_gib                               the most memory of any process beyond its imports
    copy_gb_per_s, fresh_copy_gb_per_s,
    to_megatron_gb_per_s, to_hf_gb_per_s    medians

The result of the round trip is compared with the source bit by bit. The benchmark fails if it differs.
"""

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch

from grpo_megatron.model.entries import hf_shapes
from grpo_megatron.model.families import read_architecture, weight_map
from grpo_megatron.weights.hf_writer import HFWriter, finish

TOOLS = Path(__file__).resolve().parent.parent / "tools"
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "attention_bias": False,
    "use_sliding_window": False,
    "dtype": "bfloat16",
}
# Imports of a conversion's processes: the workers, and the parent, which also asks the model for its layout.
WORKER = "import grpo_megatron.conversion.hf_to_megatron, grpo_megatron.conversion.megatron_to_hf"
PARENT = f"{WORKER}, grpo_megatron.megatron.layers.build, grpo_megatron.megatron.process_groups"
WAIT = "; print(); input()"


def make(folder: Path, layers: int) -> int:
    """Write a Qwen3 checkpoint with random weights to a new folder. Return its number of parameters."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**CONFIG, "num_hidden_layers": layers}))
    writer = HFWriter(str(folder / "parts"), "000", max_shard_bytes=2**30)
    shapes = hf_shapes(weight_map(read_architecture(str(folder))))
    for name, shape in shapes.items():
        writer.add(name, torch.randn(shape, dtype=torch.bfloat16))
    shards = writer.close()
    finish(str(folder / "parts"), shards, str(folder / "weights"))
    for path in (folder / "weights").iterdir():
        path.rename(folder / path.name)
    (folder / "weights").rmdir()
    os.sync()
    return sum(int(torch.Size(shape).numel()) for shape in shapes.values())


def anonymous(pid: int) -> int:
    """Return the bytes of a process's resident memory that are not backed by a file."""
    with open(f"/proc/{pid}/status", encoding="ascii") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("RssAnon"))


def after_imports(imports: str) -> int:
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", imports + WAIT], stdin=-1, stdout=-1, text=True
    )
    process.stdout.readline()
    found = anonymous(process.pid)
    process.communicate("\n")
    return found


def copy(source: Path, target: Path) -> float:
    """Copy the weight files to a new folder, sync each to disk, and return the speed in GB/s."""
    target.mkdir()
    begun, count = time.perf_counter(), 0
    for path in sorted(source.glob("*.safetensors")):
        shutil.copyfile(path, target / path.name)
        with open(target / path.name, "rb+") as file:
            os.fsync(file.fileno())
        count += path.stat().st_size
    return count / (time.perf_counter() - begun) / 1e9


def convert(
    tool: str, source: Path, target: Path, *arguments: str, spare: Path
) -> tuple[float, dict[int, int], int]:
    """Run a conversion tool. Return (GB/s, {pid: peak of the process's anonymous bytes}, pid of the tool).

    tool: name of the tool in tools/, without .py.
    arguments: further arguments of the tool.
    spare: folder that is deleted when the tool begins to write.
    """
    command = [sys.executable, str(TOOLS / f"{tool}.py"), str(source), str(target), *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    peaks: dict[int, int] = {}
    partial = Path(f"{target}.partial")
    threads = [
        threading.Thread(target=_watch, args=(process, peaks)),
        threading.Thread(target=_delete_at_first_write, args=(process, partial, spare)),
    ]
    for thread in threads:
        thread.start()
    output, _ = process.communicate()
    for thread in threads:
        thread.join()
    if process.returncode:
        sys.exit(f"{tool} failed")
    amount, seconds = re.search(r"([\d.]+) GB in ([\d.]+) s", output).groups()
    return float(amount) / float(seconds), peaks, process.pid


def _watch(process: subprocess.Popen, peaks: dict[int, int]) -> None:
    # Read the kernel's list of children. Looking through all processes would occupy a core that the
    # conversion needs.
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    while process.poll() is None:
        try:
            for pid in (process.pid, *map(int, children.read_text().split())):
                peaks[pid] = max(peaks.get(pid, 0), anonymous(pid))
        except (OSError, StopIteration):
            continue  # a process has just ended
        time.sleep(0.005)


def _delete_at_first_write(process: subprocess.Popen, partial: Path, spare: Path) -> None:
    while process.poll() is None and not any(Path(partial, "result").rglob("*.tmp")):
        time.sleep(0.005)
    shutil.rmtree(spare)


def same_files(first: Path, second: Path) -> bool:
    """Return True if all tensors of two HF folders are equal, bit for bit."""
    from grpo_megatron.weights.hf_checkpoint import HFCheckpoint

    a, b = HFCheckpoint(str(first)), HFCheckpoint(str(second))
    return a.names == b.names and all(
        torch.equal(a.read(name).view(torch.int16), b.read(name).view(torch.int16))
        for name in sorted(a.names)
    )


def timed(folder: Path, source: Path, options) -> tuple[dict[str, list[float]], int]:
    """Run all sides in turn. Return ({side: GB/s of each repeat}, peak bytes of a process without imports).

    folder: folder for the copies and conversions.
    source: folder of the checkpoint.
    """
    imports = {"parent": after_imports(PARENT), "worker": after_imports(WORKER)}
    speeds: dict[str, list[float]] = {"copy": [], "fresh_copy": [], "to_megatron": [], "to_hf": []}
    extra = 0
    megatron, hf, copied, spare = (folder / name for name in ("megatron", "hf", "copy", "spare"))
    how = ("--processes", str(options.processes)) if options.processes else ()
    sides: dict[str, Callable] = {
        "to_megatron": lambda: convert("convert_hf_to_megatron", source, megatron, *how, spare=spare),
        "to_hf": lambda: convert("convert_megatron_to_hf", megatron, hf, *how, spare=spare),
    }
    for _ in range(options.repeats):
        for path in (megatron, hf):
            shutil.rmtree(path, ignore_errors=True)
        copy(source, spare)
        os.sync()  # so that one side's pending writes do not slow down the next side
        shutil.rmtree(spare)
        speeds["copy"].append(copy(source, copied))
        speeds["fresh_copy"].append(copy(source, spare))  # the first copy's memory is still in use
        shutil.rmtree(spare)
        shutil.rmtree(copied)
        for side, run in sides.items():
            copy(source, spare)
            os.sync()
            speed, peaks, first = run()
            speeds[side].append(speed)
            beyond = [peak - imports["parent" if pid == first else "worker"] for pid, peak in peaks.items()]
            extra = max(extra, *beyond)
        print("  ".join(f"{side} {values[-1]:.2f} GB/s" for side, values in speeds.items()), flush=True)
    if not same_files(source, hf):
        sys.exit("the round trip changed the weights")
    return speeds, extra


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=28, help="layers of the model")
    parser.add_argument("--processes", type=int, help="number of processes; default: as the tools choose")
    parser.add_argument("--repeats", type=int, default=3, help="timed conversions of each kind")
    parser.add_argument("--folder", help="parent of the temporary folder")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        source = Path(folder, "source")
        print(f"{make(source, options.layers) / 1e9:.2f} billion parameters", flush=True)
        speeds, extra = timed(Path(folder), source, options)
    middle = {side: statistics.median(values) for side, values in speeds.items()}
    print(f"\n{'median':<16}{'GB/s':>8}{'over copy':>12}")
    for side, value in middle.items():
        print(f"{side:<16}{value:>8.2f}{value / middle['copy']:>12.2f}")
    print(f"most memory of a process beyond its imports: {extra / 2**30:.2f} GiB\n")
    result = {
        "speed_over_copy": min(middle["to_megatron"], middle["to_hf"]) / middle["copy"],
        "extra_gib": extra / 2**30,
    }
    print(json.dumps(result | {f"{side}_gb_per_s": value for side, value in middle.items()}))


if __name__ == "__main__":
    main()
