"""Measure how long a checkpoint makes training wait, and what it costs in memory, on four ranks.

    python benchmarks/checkpoint.py [--saves N] [--tokens N] [--layers N] [--before]

The layout is TP2 x DP2 with the distributed optimizer, bf16 with fp32 masters, one thread per rank. The model
is a Qwen3 of 200M parameters (hidden 1024, 16 layers). Checkpoints go to a temporary folder (see TMPDIR),
with fsync.

Timed saves: the ranks begin a checkpoint, compute log-probs of a batch and train on it, as in a run, and
complete the checkpoint after that step. Generation is left out, although it would take a share of the step.
blocked_seconds is all the time in which a rank does nothing for training: while the checkpoint begins
(finding the pieces, starting the thread), while the training step waits until the optimizer's states have
been read, and while the checkpoint is completed. save_seconds is the time from the beginning until the last
rank's file is on the disk, plus completing it. The ranks train meanwhile, which makes it longer. Both are
those of the slowest rank, medians over the saves.

Memory: one save while the ranks are idle, as during generation, because training's own memory would hide it.
    Measured is the peak of a rank's anonymous and shared memory (RssAnon + RssShmem, every 5 ms) and its
    child processes' private memory (Private_Dirty), beyond what it was just before, relative to the rank's
    weights and optimizer states. The largest of all ranks counts.

--before also measures Megatron's fully reshardable format with Megatron's own strategies, which grpo-megatron
used before it had its own writer. The second of two saves counts. The ranks are idle during these saves,
because training would wait for all of a save. This takes 16 GB of memory.

At the end, new actors load the last checkpoint: in the same layout, where weights, masters and moments must
be identical bit for bit, and with PP2 x DP2, where the exported weights are compared with those of the first
layout.

Prints a table and, as its last line, one JSON object:

    save_seconds, blocked_seconds, blocked_share   see above; the share is of save_seconds
    extra_over_state                               memory, see above
    state_bytes                                    of all ranks, as written
    bit_identical, other_layout_max_difference     of the loaded checkpoints
    step_seconds                                   of a step during which a checkpoint is written
    quiet_step_seconds                             of a step before it; the writers share the two cores
    before_seconds, before_extra_over_state        with --before
"""

import argparse
import contextlib
import gc
import hashlib
import json
import multiprocessing
import queue
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
from safetensors import safe_open

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tools"))
from make_tiny_model import make
from memory import make_batch

from grpo_megatron.algorithm.losses import PolicyLoss
from grpo_megatron.batch.train_batch import TrainBatch
from grpo_megatron.config.schema import Config, MegatronConfig, ModelConfig, OptimizerConfig, TransformerImpl
from grpo_megatron.model.parallel_sizes import ParallelSizes

SIZES, OTHER = ParallelSizes(tp=2, dp=2), ParallelSizes(pp=2, dp=2)
WAIT_SECONDS = 1800


class Extra:
    """Context that measures by how much the memory of this process and its children grows at most.

    bytes: peak within the context minus the memory at its beginning; set at its end
    """

    def __enter__(self):
        from grpo_megatron.megatron.memory.parking import return_to_system

        gc.collect()
        return_to_system()
        self._process, self._ended = psutil.Process(), False
        self._before = self.peak = self._occupied() + self._of_children()
        self._thread = threading.Thread(target=self._sample)
        self._thread.start()
        return self

    def _occupied(self) -> int:
        fields = dict(
            line.split(":", 1) for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
        )
        return sum(int(fields[name].split()[0]) * 1024 for name in ("RssAnon", "RssShmem"))

    def _of_children(self) -> int:
        total = 0
        for child in self._process.children(recursive=True):
            try:
                rows = Path(f"/proc/{child.pid}/smaps_rollup").read_text(encoding="utf-8").splitlines()
            except (ProcessLookupError, FileNotFoundError):
                continue  # the child has ended
            total += sum(int(row.split()[1]) * 1024 for row in rows if row.startswith("Private_Dirty:"))
        return total

    def _sample(self):
        while not self._ended:
            self.peak = max(self.peak, self._occupied() + self._of_children())
            time.sleep(0.005)

    def __exit__(self, *exc):
        self._ended = True
        self._thread.join()
        self.bytes = self.peak - self._before


def step(actor, batch: TrainBatch) -> float:
    """Compute log-probs of a batch and do an optimizer step on it. Return the seconds of both together."""
    begun = time.perf_counter()
    actor.passes.logprobs([batch], key=(0, 0))
    tokens = batch.num_tokens * actor.config.megatron.data_parallel
    actor.passes.train_step([batch], PolicyLoss(), tokens, current_is_old=True, key=(0, 0))
    return time.perf_counter() - begun


def save_gathering(actor, folder: str) -> None:
    """Save in Megatron's fully reshardable format, as grpo-megatron did before it had its own writer."""
    from megatron.core import dist_checkpointing
    from megatron.core import parallel_state as mpu

    metadata = {
        "distrib_optim_sharding_type": "fully_reshardable",
        "dp_cp_group": mpu.get_data_parallel_group(with_context_parallel=True),
        "singleton_local_shards": False,
    }
    weights = {
        f"model{i}": ddp.module.sharded_state_dict(metadata=metadata) for i, ddp in enumerate(actor.model.ddp)
    }
    state = actor.model.optimizer.inner.sharded_state_dict(weights, is_loading=False, metadata=metadata)
    Path(folder).mkdir(exist_ok=True)
    dist.barrier()
    dist_checkpointing.save({**weights, "optimizer": state}, folder)


def timed_save(actor, batch: TrainBatch, folder: str) -> dict[str, float]:
    dist.barrier()
    actor.checkpoints.begin(folder)
    seconds = step(actor, batch)
    begun = time.perf_counter()
    report = actor.checkpoints.finish()
    completing = time.perf_counter() - begun
    return {
        "save_seconds": report.seconds + completing,
        "blocked_seconds": report.waited,
        "step_seconds": seconds,
        "bytes": report.bytes,
    }


def digest(actor) -> str:
    """Return a digest (hexadecimal BLAKE2b) of the rank's weights and optimizer states."""
    found = hashlib.blake2b()
    for storages in (actor.model.memory.parameters(), actor.model.memory.optimizer()):
        for storage in storages.values():
            found.update(torch.empty(0, dtype=torch.uint8).set_(storage).numpy())
    return found.hexdigest()


def new_actor(sizes: ParallelSizes, rank: int, folder: str, name: str):
    from grpo_megatron.megatron import process_groups
    from grpo_megatron.megatron.actor import Actor

    process_groups.destroy()
    gc.collect()
    process_groups.initialize(sizes, rank, f"file://{folder}/{name}", seed=0, timeout_seconds=WAIT_SECONDS)
    megatron = MegatronConfig(
        **sizes.settings(), transformer_impl=TransformerImpl.local, distributed_optimizer=True
    )
    model, optimizer = ModelConfig(path=f"{folder}/model"), OptimizerConfig(lr=1e-4)
    return Actor(Config(model=model, megatron=megatron, optimizer=optimizer))


def measure(rank: int, folder: str, options: argparse.Namespace, results) -> None:
    torch.set_num_threads(1)
    batch = make_batch(options.tokens)
    actor = new_actor(SIZES, rank, folder, "store")
    step(actor, batch)
    found = {"saves": []}
    for index in range(options.saves):
        quiet = step(actor, batch)
        found["saves"].append(
            timed_save(actor, batch, f"{folder}/timed{index}") | {"quiet_step_seconds": quiet}
        )
    state = sum(size for kind, size in actor.model.memory.resident().items() if kind != "gradients")
    with Extra() as extra:
        dist.barrier()
        actor.checkpoints.begin(f"{folder}/kept")
        while not actor.checkpoints.written():
            time.sleep(0.01)
        actor.checkpoints.finish()
    found["extra_over_state"] = extra.bytes / state
    for index in range(2 if options.before else 0):  # the first save also starts Megatron's result process
        with Extra() as extra:
            dist.barrier()
            begun = time.perf_counter()
            save_gathering(actor, f"{folder}/gathered{index}")
            found["before_seconds"] = time.perf_counter() - begun
        found["before_extra_over_state"] = extra.bytes / state
    saved = digest(actor)
    actor.weights.save_hf(f"{folder}/hf")
    del actor
    actor = new_actor(SIZES, rank, folder, "store of the resumed")
    actor.checkpoints.load(f"{folder}/kept")
    found["bit_identical"] = digest(actor) == saved
    del actor
    actor = new_actor(OTHER, rank, folder, "store of the other")
    actor.checkpoints.load(f"{folder}/kept")
    actor.weights.save_hf(f"{folder}/other_hf")
    results.put(found)


def largest_difference(one: Path, other: Path) -> float:
    """Return the largest absolute difference between elements of the same tensor in two HF folders.

    Raises AssertionError if the folders have different tensors.
    """
    tensors = [{}, {}]
    for folder, found in zip((one, other), tensors, strict=True):
        for path in folder.glob("*.safetensors"):
            with safe_open(path, "pt") as file:
                found.update({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118 - no mapping
    if tensors[0].keys() != tensors[1].keys():
        raise AssertionError("the exports have different tensors")
    return max(
        float((tensor.float() - tensors[1][name].float()).abs().max()) for name, tensor in tensors[0].items()
    )


def run(folder: str, options: argparse.Namespace) -> list[dict]:
    """Start the processes of the ranks, and return the result of `measure` of each rank.

    Raises RuntimeError if a rank fails.
    """
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    # The ranks are no daemons, because Megatron's strategies start processes of their own.
    ranks = [
        context.Process(target=measure, args=(rank, folder, options, results))
        for rank in range(SIZES.world_size)
    ]
    for process in ranks:
        process.start()
    found = []
    try:
        while len(found) < len(ranks):
            if any(process.exitcode for process in ranks):
                raise RuntimeError("a rank has failed")
            with contextlib.suppress(queue.Empty):
                found.append(results.get(timeout=1))
        return found
    finally:
        for process in ranks:
            process.join(timeout=20)
            process.kill()


def summary(found: list[dict], difference: float) -> dict:
    """Return the figures of the last line (see the module docstring).

    Times are medians over the saves, and in each save those of the slowest rank.

    found: result of `measure` of each rank.
    difference: largest difference between the weights exported in the two layouts.
    """
    saves = [
        {name: max(rank["saves"][i][name] for rank in found) for name in found[0]["saves"][i]}
        for i in range(len(found[0]["saves"]))
    ]
    result = {
        "blocked_share": statistics.median(save["blocked_seconds"] / save["save_seconds"] for save in saves)
    }
    for name in ("save_seconds", "blocked_seconds", "step_seconds", "quiet_step_seconds"):
        result[name] = statistics.median(save[name] for save in saves)
    for name in ("extra_over_state", "before_seconds", "before_extra_over_state"):
        if name in found[0]:
            result[name] = max(rank[name] for rank in found)
    result["state_bytes"] = sum(rank["saves"][0]["bytes"] for rank in found)
    result["bit_identical"] = all(rank["bit_identical"] for rank in found)
    result["other_layout_max_difference"] = difference
    return result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--saves", type=int, default=3, help="number of timed saves")
    parser.add_argument("--tokens", type=int, default=1024, help="tokens in each replica's batch")
    parser.add_argument("--layers", type=int, default=16, help="layers of the model")
    parser.add_argument("--before", action="store_true", help="also measure the previous method")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        count = make(Path(folder, "model"), hidden=1024, layers=options.layers, heads=8, kv_heads=4, ffn=3072)
        found = run(folder, options)
        result = summary(found, largest_difference(Path(folder, "hf"), Path(folder, "other_hf")))
    print(f"{count / 1e6:.0f}M parameters, {result['state_bytes'] / 1e9:.2f} GB, four ranks")
    print(f"{'':<44}{'now':>10}" + (f"{'before':>10}" if options.before else ""))
    for text, name, before in (
        ("seconds of the whole save", "save_seconds", "before_seconds"),
        ("seconds that training waits", "blocked_seconds", "before_seconds"),
        ("extra memory, relative to the state", "extra_over_state", "before_extra_over_state"),
    ):
        print(f"{text:<44}{result[name]:>10.3f}" + (f"{result[before]:>10.3f}" if before in result else ""))
    print(
        f"a step takes {result['step_seconds']:.1f} s while a checkpoint is written, otherwise "
        f"{result['quiet_step_seconds']:.1f} s"
    )
    print(json.dumps(result))


if __name__ == "__main__":
    main()
