"""Measure the micro-batch scheduler on a large batch: full and balanced micro-batches, and speed.

    python benchmarks/schedule.py [--calls N]

65,536 sequences of log-normal length (mean 4096 before clipping to [1, 32768]), micro-batches of 32,768
tokens, 64 data-parallel ranks; three widths of the distribution, three seeds each. Then 8,192 sequences on 8
ranks, compared with plain first-fit-decreasing, whose micro-batches are dealt to the ranks in turn.

Prints tables and, as its last line, one JSON object. The first three are the worst of all cases:

    bins_over_bound            micro-batches for one rank, minus ceil(tokens / max_tokens)
    flops_imbalance            FLOPs of the most loaded rank over the mean, minus 1
    lockstep_imbalance         the same if ranks wait for each other in every micro-batch: sum over i of the
                               largest micro-batch i over the sum of the means, minus 1
    seconds_64k                median of all calls
    seconds_64k_slowest_case   largest median of a case
"""

import argparse
import itertools
import json
import statistics
import time

import numpy as np

from grpo_megatron.batch.schedule import CostModel, schedule

MAX_TOKENS = 32768
COST = CostModel()


def random_lengths(count: int, sigma: float, seed: int) -> np.ndarray:
    """Return log-normal random lengths in tokens, clipped to MAX_TOKENS, int64 [count]."""
    lengths = np.random.default_rng(seed).lognormal(np.log(4096) - sigma**2 / 2, sigma, count)
    return lengths.astype(np.int64).clip(1, MAX_TOKENS)


def first_fit_decreasing(lengths: np.ndarray, dp: int) -> list[list[list[int]]]:
    """Pack sequences by the textbook method. Return micro_batches[dp_rank][i], lists of sequence indices.

    Sequences are taken in order of decreasing length. Each goes to the first micro-batch that it fits in.
    Micro-batches are dealt to the `dp` ranks in turn, so ranks may have different numbers of them.
    """
    bins: list[list[int]] = []
    room: list[int] = []
    for i in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[i])
        for b, free in enumerate(room):
            if length <= free:
                bins[b].append(i)
                room[b] -= length
                break
        else:
            bins.append([i])
            room.append(MAX_TOKENS - length)
    return [bins[rank::dp] for rank in range(dp)]


def imbalance(micro_batches, lengths: np.ndarray) -> tuple[float, float]:
    """Return (flops_imbalance, lockstep_imbalance) of a partition, as the module docstring defines them.

    micro_batches: micro_batches[dp_rank][i] has the indices of the sequences.
    """
    flops = COST.flops(lengths)
    cost = np.zeros((len(micro_batches), max(map(len, micro_batches))))
    for rank, chosen in enumerate(micro_batches):
        for i, micro_batch in enumerate(chosen):
            cost[rank, i] = flops[list(micro_batch)].sum()
    total = cost.sum(axis=1)
    return total.max() / total.mean() - 1, cost.max(axis=0).sum() / cost.mean(axis=0).sum() - 1


def bins_over_bound(lengths: np.ndarray) -> int:
    """Schedule the sequences for a single rank. Return its micro-batches minus ceil(tokens / MAX_TOKENS)."""
    return schedule(lengths, MAX_TOKENS, cost=COST).num_micro_batches - -(-int(lengths.sum()) // MAX_TOKENS)


def measure(call, repeats: int):
    """Call a function `repeats` times. Return (result of the last call, seconds of each call)."""
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        result = call()
        seconds.append(time.perf_counter() - start)
    return result, seconds


def show(name: str, over: int, flops: float, lockstep: float, seconds: list[float]) -> None:
    print(
        f"{name:<38}{over:>10}{flops:>13.2e}{lockstep:>13.2e}{statistics.median(seconds):>11.3f}{max(seconds):>9.3f}"
    )


def compare(repeats: int) -> None:
    lengths, dp = random_lengths(8192, 1.0, 0), 8
    dealt, seconds = measure(lambda: first_fit_decreasing(lengths, dp), repeats)
    bound = -(-int(lengths.sum()) // MAX_TOKENS)
    show("8,192: first-fit-decreasing", sum(map(len, dealt)) - bound, *imbalance(dealt, lengths), seconds)
    plan, seconds = measure(lambda: schedule(lengths, MAX_TOKENS, dp, COST), repeats)
    show("8,192: schedule", bins_over_bound(lengths), *imbalance(plan.micro_batches, lengths), seconds)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--calls", type=int, default=5, help="measured calls of each case")
    options = parser.parse_args()
    print(f"{'sequences':<38}{'bins over':>10}{'FLOPs imb.':>13}{'lockstep':>13}{'s (median)':>11}{'max':>9}")
    results = []
    for sigma in (0.8, 1.0, 1.3):
        for seed in range(3):
            lengths = random_lengths(65536, sigma, seed)
            plan, seconds = measure(
                lambda lengths=lengths: schedule(lengths, MAX_TOKENS, 64, COST), options.calls
            )
            result = (bins_over_bound(lengths), *imbalance(plan.micro_batches, lengths), seconds)
            show(f"65,536: sigma {sigma}, seed {seed}, mean {lengths.mean():.0f}", *result)
            results.append(result)
    compare(options.calls)
    over, flops, lockstep, seconds = zip(*results, strict=True)
    summary = {
        "bins_over_bound": max(over),
        "flops_imbalance": max(flops),
        "seconds_64k": statistics.median(itertools.chain(*seconds)),
        "seconds_64k_slowest_case": max(map(statistics.median, seconds)),
        "lockstep_imbalance": max(lockstep),
    }
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
