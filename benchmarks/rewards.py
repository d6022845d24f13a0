"""Measure rewards per second of the reward workers, against a plain process pool of the same size.

    python benchmarks/rewards.py [--workers N] [--repeats N] [--samples N]

Both sides compute the same two functions: a cheap one (is the answer in the response?) and one that takes a
millisecond of CPU time. All samples of a repetition are awaited at once in one event loop, as in a step. Our
workers get token ids, which they decode, and have limits on memory, files and time. The processes of
concurrent.futures get text. Both sides take turns after a warm-up; figures are medians.

Start it in the repository's folder, where both sides find the functions. Prints a table and, as its last
line, one JSON object:

    rewards_over_pool    rewards per second, ours / plain, of the function where it is smaller; target 0.8
    NAME_over_pool, NAME_per_second, NAME_pool_per_second    for each function
"""

import argparse
import asyncio
import importlib
import json
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor

import numpy as np
import ray

from grpo_megatron.batch.prompt import Prompt
from grpo_megatron.batch.sample import Sample
from grpo_megatron.cluster.ray_connection import connect
from grpo_megatron.cluster.worker_pool import worker_places
from grpo_megatron.config.reward import RewardConfig
from grpo_megatron.rewards import RewardWorkers

# Other processes run the functions of this file. They import it under this name, not as __main__.
MODULE = "benchmarks.rewards"
TOKENS = 256


def cheap(prompt, response, answer, record):
    return float(answer in response)


def millisecond(prompt, response, answer, record):
    end = time.process_time() + 0.001
    while time.process_time() < end:
        pass
    return float(answer in response)


def decode(ids: np.ndarray) -> str:
    return ids.astype(np.uint8).tobytes().decode("ascii")


def samples(count: int) -> list[tuple[Prompt, Sample]]:
    rng = np.random.default_rng(0)
    found = []
    for uid in range(count):
        ids = rng.integers(ord("0"), ord("9") + 1, TOKENS).astype(np.int32)
        prompt = Prompt(uid, ids[:8], "12+34=", str(uid % 100), {"level": 3})
        found.append(
            (
                prompt,
                Sample.of(
                    0, uid, prompt.ids, ids, np.ones(TOKENS, bool), np.zeros(TOKENS, np.float32), "stop"
                ),
            )
        )
    return found


def rates(
    name: str, workers: int, repeats: int, given: list[tuple[Prompt, Sample]], logs: str
) -> tuple[list[float], list[float]]:
    """Score all samples with both sides. Return (our rewards per second, the plain pool's) as lists.

    The lists have one value for each repetition.

    name: reward function in this file.
    workers: number of processes of each side.
    given: prompts and samples to score in each repetition.
    logs: folder for the logs of our workers.

    Raises RuntimeError if the rewards of both sides differ.
    """
    function = getattr(importlib.import_module(MODULE), name)
    places = worker_places([ray.get_runtime_context().get_node_id()], workers, logs)
    ours = RewardWorkers(
        RewardConfig(function=f"{MODULE}:{name}"), importlib.import_module(MODULE).decode, places
    )
    plain = ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn"))
    texts = [decode(sample.arrays.response_ids) for _, sample in given]

    async def by_ours() -> list[float]:
        return [
            one.reward
            for one in await asyncio.gather(*(ours.score(prompt, sample) for prompt, sample in given))
        ]

    async def by_plain() -> list[float]:
        futures = [
            plain.submit(function, prompt.text, text, prompt.answer, prompt.fields)
            for (prompt, _), text in zip(given, texts, strict=True)
        ]
        return await asyncio.gather(*map(asyncio.wrap_future, futures))

    def timed(call: Callable) -> tuple[float, list[float]]:
        start = time.perf_counter()
        found = asyncio.run(call())
        return len(given) / (time.perf_counter() - start), found

    measured: tuple[list[float], list[float]] = ([], [])
    try:
        for repeat in range(repeats + 1):
            (rate, found), (rate_of_pool, expected) = timed(by_ours), timed(by_plain)
            if found != expected:
                raise RuntimeError("the rewards of both sides differ")
            if repeat:
                measured[0].append(rate)
                measured[1].append(rate_of_pool)
    finally:
        ours.close()
        plain.shutdown()
    return measured


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, default=2, help="processes of each side")
    parser.add_argument("--repeats", type=int, default=7, help="timed repetitions")
    parser.add_argument("--samples", type=int, default=2048, help="samples to score in each repetition")
    options = parser.parse_args()
    sys.path.insert(0, "")
    connect(None, options.workers)
    results: dict[str, float] = {}
    given = samples(options.samples)
    print(f"{'':<14}{'ours / s':>12}{'pool / s':>12}{'ours / pool':>14}")
    with tempfile.TemporaryDirectory() as logs:
        for name in ("cheap", "millisecond"):
            ours, plain = map(statistics.median, rates(name, options.workers, options.repeats, given, logs))
            results |= {
                f"{name}_over_pool": ours / plain,
                f"{name}_per_second": ours,
                f"{name}_pool_per_second": plain,
            }
            print(f"{name:<14}{ours:>12.0f}{plain:>12.0f}{ours / plain:>14.2f}")
    ray.shutdown()
    print(
        json.dumps(
            {
                "rewards_over_pool": min(results["cheap_over_pool"], results["millisecond_over_pool"]),
                **results,
            }
        )
    )


if __name__ == "__main__":
    main()
