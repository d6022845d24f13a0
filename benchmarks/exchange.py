"""Measure the exchange of the policy's weights for the reference's, which are kept in host memory.

    python benchmarks/exchange.py [--repeats N]

One rank, bf16, a Qwen3 of 290M parameters, on a GPU if there is one. An exchange copies all weights of the
policy to host memory, and all weights of the reference from host memory into the model. A plain copy moves
the same bytes out and in, and does nothing else. Both take turns after a warm-up; figures are medians. On a
CPU, seconds are CPU time of one thread, which other load on the machine affects least; on a GPU, they are
elapsed time until the copies have ended. Afterwards the policy's weights must be unchanged, bit for bit.

Then the exchanges of one step with four mini-batches are counted.

Prints a table and, as its last line, one JSON object:

    swap_over_copy                   exchange / plain copy; target 1.2
    exchange_seconds, copy_seconds
    gigabytes                        size of the weights
    exchanges_per_step               target 2
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tools"))
from make_tiny_model import make

from grpo_megatron.batch.sample import Sample
from grpo_megatron.batch.train_batch import TrainBatch
from grpo_megatron.config.algorithm import AlgorithmConfig
from grpo_megatron.config.schema import Config, MegatronConfig, ModelConfig, TransformerImpl
from grpo_megatron.megatron import process_groups
from grpo_megatron.megatron.actor import Actor
from grpo_megatron.megatron.memory.host import host_memory
from grpo_megatron.model.parallel_sizes import ParallelSizes

MINI_BATCHES = 4


def seconds(device: torch.device, call: Callable[[], None]) -> float:
    clock = time.process_time if device.type == "cpu" else time.perf_counter
    backend = torch.get_device_module(device)
    backend.synchronize()
    start = clock()
    call()
    backend.synchronize()
    return clock() - start


def measure(actor: Actor, repeats: int) -> dict[str, float]:
    own = [
        parameter.detach().view(-1).view(torch.uint8)
        for chunk in actor.model.chunks
        for parameter in chunk.parameters()
    ]
    host = [host_memory(values.nbytes) for values in own]

    def exchange() -> None:
        with actor.passes.reference():
            pass

    def copy() -> None:
        for _ in range(2):
            for values, waiting in zip(own, host, strict=True):
                waiting.copy_(values, non_blocking=True)
            for values, waiting in zip(own, host, strict=True):
                values.copy_(waiting, non_blocking=True)

    before = [values.clone() for values in own]
    times: dict[str, list[float]] = {"exchange": [], "copy": []}
    for _ in range(repeats + 1):
        times["exchange"].append(seconds(actor.model.device, exchange) / 2)
        times["copy"].append(seconds(actor.model.device, copy) / 2)
    if not all(torch.equal(one, other) for one, other in zip(own, before, strict=True)):
        raise RuntimeError("exchanging the weights twice did not restore them")
    found = {f"{name}_seconds": statistics.median(values[1:]) for name, values in times.items()}
    gigabytes = sum(values.nbytes for values in own) / 1e9
    return {
        "swap_over_copy": found["exchange_seconds"] / found["copy_seconds"],
        **found,
        "gigabytes": gigabytes,
    }


def exchanges_of_a_step(actor: Actor) -> int:
    """Count the exchanges of weights in a step that computes reference log-probs for each mini-batch."""
    plain, made = actor.model.reference._exchange, []
    actor.model.reference._exchange = lambda: made.append(plain())
    rng = np.random.default_rng(0)
    with actor.passes.reference():
        for index in range(MINI_BATCHES):
            ids = rng.integers(6, 29, 12).astype(np.int32)
            sample = Sample.of(
                0, index, ids[:4], ids[4:], np.ones(8, np.bool_), np.full(8, -3.0, np.float32), "stop"
            )
            actor.passes.logprobs([TrainBatch.from_samples([sample])], reference=True, key=(1, index))
    actor.model.reference._exchange = plain
    return len(made)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=9, help="timed exchanges")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        make(Path(folder, "model"), hidden=1024, layers=24, heads=8, ffn=3072)
        process_groups.initialize(ParallelSizes(), 0, f"file://{folder}/store", seed=0)
        config = Config(
            model=ModelConfig(path=f"{folder}/model"),
            megatron=MegatronConfig(transformer_impl=TransformerImpl.local),
            algorithm=AlgorithmConfig(use_kl_loss=True),
        )
        actor = Actor(config)
        results = measure(actor, options.repeats)
        results["exchanges_per_step"] = exchanges_of_a_step(actor)
        process_groups.destroy()
    size = results["gigabytes"]
    print(f"{'':<12}{'seconds':>10}{'GB/s each way':>16}")
    for name in ("exchange", "copy"):
        taken = results[f"{name}_seconds"]
        print(f"{name:<12}{taken:>10.4f}{size / taken:>16.2f}")
    print(f"{results['exchanges_per_step']} exchanges in a step of {MINI_BATCHES} mini-batches")
    print(json.dumps(results))


if __name__ == "__main__":
    main()
