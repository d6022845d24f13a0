"""Measure the memory of one training rank with recomputation, offloading and sleep.

    python benchmarks/memory.py [--tokens N]

One rank, bf16 with fp32 masters, a Qwen3 of 46M parameters (hidden 512, 12 layers), one micro-batch of 8
sequences. Each case runs in a fresh process. The memory is anonymous resident memory, or with CUDA what the
allocator has reserved. It is measured after the first step (at rest), at the peak of the second step (sampled
every 5 ms), and asleep.

Prints a table and, as its last line, one JSON object: for each case its three figures in MiB, and
activations_full and activations_selective (peak beyond the memory at rest, relative to no recomputation).
"""

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tools"))
from make_tiny_model import make

from grpo_megatron.algorithm.losses import PolicyLoss
from grpo_megatron.batch.sample import Sample
from grpo_megatron.batch.train_batch import TrainBatch
from grpo_megatron.config.schema import (
    Config,
    MegatronConfig,
    ModelConfig,
    OptimizerConfig,
    Recompute,
    TransformerImpl,
)
from grpo_megatron.megatron import process_groups
from grpo_megatron.model.parallel_sizes import ParallelSizes

SELECTIVE = {"recompute": Recompute.selective, "recompute_modules": ["core_attn", "mlp"]}
FULL = {"recompute": Recompute.full}
# case -> (settings of the section megatron, whether the optimizer is offloaded)
CASES = {
    "plain": ({}, False),
    "selective recompute": (SELECTIVE, False),
    "full recompute": (FULL, False),
    "optimizer offloaded": ({}, True),
    "full recompute, offloaded": (FULL, True),
}
SEQUENCES = 8


def make_batch(tokens: int) -> TrainBatch:
    rng = np.random.default_rng(0)
    length = tokens // SEQUENCES
    samples = [
        Sample.of(
            group_id=0,
            trajectory_id=i,
            prompt_ids=rng.integers(6, 29, length // 4).astype(np.int32),
            response_ids=rng.integers(6, 29, length - length // 4).astype(np.int32),
            loss_mask=np.ones(length - length // 4, dtype=np.bool_),
            rollout_logprobs=np.full(length - length // 4, -3.0, dtype=np.float32),
            finish_reason="stop",
        )
        for i in range(SEQUENCES)
    ]
    batch = TrainBatch.from_samples(samples)
    batch.weight = (batch.loss_mask / batch.loss_mask.sum()).astype(np.float32)
    batch.advantage = np.where(batch.loss_mask, rng.normal(size=batch.num_tokens), 0).astype(np.float32)
    return batch


class Peak:
    """Context that measures the largest memory of this process within it.

    bytes: the largest memory so far
    """

    def __enter__(self):
        self.bytes, self._ended = 0, False
        self._thread = threading.Thread(target=self._sample)
        self._thread.start()
        return self

    def _sample(self):
        from grpo_megatron.cluster.memory import occupied

        while not self._ended:
            self.bytes = max(self.bytes, occupied())
            time.sleep(0.005)

    def __exit__(self, *exc):
        self._ended = True
        self._thread.join()


def measure(case: str, model: str, tokens: int) -> dict[str, float]:
    """Run two training steps. Return {"rest": ..., "peak": ..., "asleep": ...} in MiB beyond the imports.

    rest: memory after the first step. peak: largest memory in the second step. asleep: memory while the rank
    sleeps, between the steps.

    case: key of CASES.
    model: folder of the model.
    tokens: number of tokens of the micro-batch.
    """
    from grpo_megatron.cluster.memory import occupied
    from grpo_megatron.megatron.actor import Actor

    torch.set_num_threads(1)
    batch = make_batch(tokens)
    with tempfile.TemporaryDirectory() as folder:
        process_groups.initialize(ParallelSizes(), 0, f"file://{folder}/store", seed=0)
        imports = occupied()
        settings, offload = CASES[case]
        config = Config(
            model=ModelConfig(path=model),
            megatron=MegatronConfig(transformer_impl=TransformerImpl.local, **settings),
            optimizer=OptimizerConfig(offload=offload),
        )
        actor = Actor(config)
        actor.passes.train_step([batch], PolicyLoss(), batch.num_tokens, current_is_old=True)
        asleep = actor.memory.sleep()["asleep"]["occupied"]  # sleep() also returns freed memory to the system
        actor.memory.wake()
        rest = occupied()
        with Peak() as peak:
            actor.passes.train_step([batch], PolicyLoss(), batch.num_tokens, current_is_old=True)
        process_groups.destroy()
    figures = {"rest": rest, "peak": peak.bytes, "asleep": asleep}
    return {name: (value - imports) / 2**20 for name, value in figures.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=4096, help="tokens in the micro-batch")
    parser.add_argument("--case", choices=CASES, help=argparse.SUPPRESS)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        print(json.dumps(measure(options.case, options.model, options.tokens)))
        return
    results = {}
    print(f"{'MiB beyond the imports':<28}{'at rest':>10}{'peak of a step':>16}{'asleep':>10}")
    with tempfile.TemporaryDirectory() as folder:
        make(Path(folder, "model"), hidden=512, layers=12, heads=8, ffn=2048)
        for case in CASES:
            command = [
                sys.executable,
                __file__,
                "--case",
                case,
                "--model",
                f"{folder}/model",
                "--tokens",
                str(options.tokens),
            ]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
            figures = results[case] = json.loads(done.stdout.splitlines()[-1])
            print(
                f"{case:<28}{figures['rest']:>10.0f}{figures['peak']:>16.0f}{figures['asleep']:>10.0f}",
                flush=True,
            )
    plain = results["plain"]["peak"] - results["plain"]["rest"]
    for name, case in (("selective", "selective recompute"), ("full", "full recompute")):
        results[f"activations_{name}"] = (results[case]["peak"] - results[case]["rest"]) / plain
    print(json.dumps(results))


if __name__ == "__main__":
    main()
