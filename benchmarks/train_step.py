"""Tokens per second of an optimizer step: packed against one sequence per micro-batch.

    python benchmarks/train_step.py [--steps N]

One rank, float32, one thread on a CPU; a Qwen3 of 2.5M parameters; 64 sequences of log-normal length. Prints a table and, as
its last line, one JSON object: packed_tokens_per_second, unpacked_tokens_per_second, packed_speedup (medians).
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tools"))
from make_tiny_model import make

from grpo_megatron.algorithm.losses import PolicyLoss
from grpo_megatron.batch import Sample, TrainBatch, schedule, token_weights
from grpo_megatron.config.schema import OptimizerConfig
from grpo_megatron.megatron import parallel
from grpo_megatron.megatron.actor import Actor
from grpo_megatron.megatron.parallel import ParallelSizes
from grpo_megatron.megatron.spec import ActorSpec


def random_batch(count: int, seed: int = 0) -> TrainBatch:
    rng = np.random.default_rng(seed)
    lengths = rng.lognormal(4.0, 0.6, count).astype(int).clip(8, 400)
    samples = [
        Sample(
            group_id=i // 8,
            trajectory_id=i,
            prompt_ids=rng.integers(6, 29, 8).astype(np.int32),
            response_ids=rng.integers(6, 29, length).astype(np.int32),
            loss_mask=np.ones(length, dtype=np.bool_),
            rollout_logprobs=np.full(length, -3.0, dtype=np.float32),
            finish_reason="stop",
        )
        for i, length in enumerate(lengths)
    ]
    batch = TrainBatch.from_samples(samples)
    batch.weight = token_weights(batch, "token-mean", 400)
    batch.advantage = np.where(batch.loss_mask, rng.normal(size=batch.num_tokens), 0).astype(np.float32)
    return batch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=5, help="measured steps of each kind")
    options = parser.parse_args()
    torch.set_num_threads(1)
    batch = random_batch(64)
    rates: dict[bool, list[float]] = {True: [], False: []}
    with tempfile.TemporaryDirectory() as folder:
        make(Path(folder, "model"), hidden=256, layers=4, heads=8, ffn=512)
        parallel.initialize(ParallelSizes(), 0, f"file://{folder}/store", seed=0)
        actor = Actor(ActorSpec(f"{folder}/model", ParallelSizes(), OptimizerConfig()))
        # In turn, so that a slow phase of the machine hits both; the first round warms up.
        for step in range(options.steps + 1):
            for packing in (True, False):
                plan = schedule(batch.lengths, 4096, packing=packing)
                micro_batches = [batch.select(mb) for mb in plan.micro_batches[0]]
                start = time.perf_counter()
                actor.train_step(micro_batches, PolicyLoss(), batch.num_tokens, current_is_old=True)
                if step:
                    rates[packing].append(batch.num_tokens / (time.perf_counter() - start))
        parallel.destroy()
    packed, unpacked = statistics.median(rates[True]), statistics.median(rates[False])
    print(f"{'':<24}{'tokens/s (median)':>20}{'min':>10}{'max':>10}")
    for name, packing in (("packed", True), ("one per micro-batch", False)):
        values = rates[packing]
        print(f"{name:<24}{statistics.median(values):>20.0f}{min(values):>10.0f}{max(values):>10.0f}")
    result = {"packed_tokens_per_second": packed, "unpacked_tokens_per_second": unpacked, "packed_speedup": packed / unpacked}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
