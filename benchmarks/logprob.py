"""Measure memory and time of the head (log-probs and entropy fused with the projection) against whole logits.

    python benchmarks/logprob.py [--tokens-memory T] [--tokens-time T] [--device cuda]

Hidden size 1024, vocabulary 151,936, float32. The baseline is F.linear, log_softmax, gather and -(p log
p).sum(). Both sides then do the backward pass of one weighted sum of log-prob and entropy.

Memory: each side runs in a fresh process. On a CPU it is the high-water mark of resident memory (VmHWM) minus
    the resident memory just before the forward pass; on a GPU it is torch's peak minus what was allocated. In
    both cases the gradients of weight and hidden states are subtracted. The baseline needs about 10 GB at
    4096 tokens.

Time: both sides run in turn in one process; figures are medians. On a CPU with one thread it is CPU time,
    which other load on the machine affects least. With --threads above 1, and on a GPU, it is wall-clock
    time.

Prints a table and, as its last line, one JSON object:

    memory_ratio, forward_ratio    ours / baseline
    time_ratio                     ours / baseline, forward and backward pass
    max_error                      largest difference from the baseline in float64, on 256 tokens: of a
                                   log-prob or entropy in nats, or of a gradient relative to the largest entry

The table also has the error of the float32 baseline, whose long sums lose more precision.
"""

import argparse
import copy
import json
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F

from grpo_megatron.megatron import process_groups
from grpo_megatron.megatron.head.logprobs import token_logprobs
from grpo_megatron.model.parallel_sizes import ParallelSizes


def baseline(hidden, weight, target):
    log_p = F.log_softmax(F.linear(hidden, weight), dim=-1)
    return log_p.gather(1, target[:, None])[:, 0], -(log_p.exp() * log_p).sum(dim=-1)


def ours(hidden, weight, target):
    group = dist.group.WORLD
    return token_logprobs(hidden, weight, target, 1.0, len(weight), group, sequence_parallel=False)[:2]


SIDES: dict[str, Callable] = {"baseline": baseline, "ours": ours}


class Inputs:
    def __init__(self, options: argparse.Namespace, tokens: int):
        generator = torch.Generator(options.device).manual_seed(0)
        at = {"device": options.device}
        self.hidden = torch.empty(tokens, options.hidden, **at).normal_(generator=generator).requires_grad_()
        # The logits have a standard deviation of 2, so that the distribution is neither uniform nor certain.
        std = 2 / options.hidden**0.5
        self.weight = (
            torch.empty(options.vocab, options.hidden, **at)
            .normal_(0, std, generator=generator)
            .requires_grad_()
        )
        self.target = torch.randint(options.vocab, (tokens,), generator=generator, **at)
        self.of_logp, self.of_entropy = torch.empty(2, tokens, **at).normal_(generator=generator)

    def loss(self, logp: torch.Tensor, entropy: torch.Tensor) -> torch.Tensor:
        return (self.of_logp * logp + 0.1 * self.of_entropy * entropy).sum()

    def double(self) -> "Inputs":
        """Return the same values in float64."""
        other = copy.copy(self)
        other.hidden = self.hidden.detach().double().requires_grad_()
        other.weight = self.weight.detach().double().requires_grad_()
        return other

    def forget_gradients(self) -> None:
        self.hidden.grad = self.weight.grad = None


def join(options: argparse.Namespace, folder: str) -> None:
    torch.set_num_threads(options.threads)
    process_groups.initialize(ParallelSizes(), 0, f"file://{Path(folder) / 'rendezvous'}", seed=0)


def resident_bytes(field: str) -> int:
    """Return the resident memory of this process in bytes.

    field: VmRSS for the present value, or VmHWM for the high-water mark.
    """
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")


def peak_memory(options: argparse.Namespace, side: str) -> int:
    """Run forward and backward pass of one side. Return its peak memory in bytes beyond inputs and gradients.

    Call this function in a fresh process, because the high-water mark of memory is never reset.

    side: key of SIDES.
    """
    cuda = options.device == "cuda"
    with tempfile.TemporaryDirectory() as folder:
        join(options, folder)
        # Load the libraries, with small inputs: the high-water mark is never reset.
        gradients(Inputs(argparse.Namespace(**(vars(options) | {"vocab": 16, "hidden": 8})), 4), SIDES[side])
        inputs = Inputs(options, options.tokens_memory)
        if cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated() if cuda else resident_bytes("VmRSS")
        inputs.loss(*SIDES[side](inputs.hidden, inputs.weight, inputs.target)).backward()
        peak = torch.cuda.max_memory_allocated() if cuda else resident_bytes("VmHWM")
        process_groups.destroy()
        return peak - before - inputs.hidden.grad.nbytes - inputs.weight.grad.nbytes


def seconds(options: argparse.Namespace) -> float:
    if options.device == "cuda":
        torch.cuda.synchronize()
    elif options.threads == 1:
        return time.process_time()
    return time.perf_counter()


def one_pass(options: argparse.Namespace, inputs: Inputs, side: str) -> tuple[float, float]:
    """Run one side. Return (seconds of the forward pass, seconds of forward and backward pass together).

    The gradients stay in `inputs`.

    side: key of SIDES.
    """
    inputs.forget_gradients()
    start = seconds(options)
    values = SIDES[side](inputs.hidden, inputs.weight, inputs.target)
    middle = seconds(options)
    inputs.loss(*values).backward()
    return middle - start, seconds(options) - start


def gradients(inputs: Inputs, function: Callable) -> list[torch.Tensor]:
    """Return [log-probs, entropies, gradient of the hidden states, gradient of the weight] of one side.

    function: value of SIDES.
    """
    inputs.forget_gradients()
    values = function(inputs.hidden, inputs.weight, inputs.target)
    inputs.loss(*values).backward()
    return [*(value.detach() for value in values), inputs.hidden.grad, inputs.weight.grad]


def max_errors(options: argparse.Namespace) -> dict[str, float]:
    """Return {side: largest error}, compared with the baseline in float64 on the same inputs.

    Errors of gradients are relative to the largest entry of the gradient.
    """
    inputs = Inputs(options, min(options.tokens_time, 256))
    found = {side: gradients(inputs, function) for side, function in SIDES.items()}
    exact = gradients(inputs.double(), baseline)
    scales = [1.0, 1.0, *(grad.abs().max().item() for grad in exact[2:])]
    return {
        side: max(
            (a - b).abs_().max().item() / scale for a, b, scale in zip(values, exact, scales, strict=True)
        )
        for side, values in found.items()
    }


def measure(options: argparse.Namespace) -> dict[str, float]:
    memory = {}
    for side in SIDES:
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as fresh:
            memory[side] = fresh.submit(peak_memory, options, side).result()
    with tempfile.TemporaryDirectory() as folder:
        join(options, folder)
        errors = max_errors(options)  # also warms up
        inputs = Inputs(options, options.tokens_time)
        times: dict[str, list[tuple[float, float]]] = {side: [] for side in SIDES}
        for _ in range(options.repeats):
            for side in SIDES:
                times[side].append(one_pass(options, inputs, side))
        process_groups.destroy()
    forward, total = ({side: statistics.median(t[i] for t in times[side]) for side in SIDES} for i in (0, 1))
    print(f"{'':10} {'memory, MiB':>12} {'forward, s':>11} {'both, s':>9} {'max error':>10}")
    for side in SIDES:
        print(
            f"{side:10} {memory[side] / 2**20:12.1f} {forward[side]:11.3f} "
            f"{total[side]:9.3f} {errors[side]:10.1e}"
        )
    return {
        "memory_ratio": memory["ours"] / memory["baseline"],
        "forward_ratio": forward["ours"] / forward["baseline"],
        "time_ratio": total["ours"] / total["baseline"],
        "max_error": errors["ours"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens-memory", type=int, default=4096, help="tokens of the measurement of memory")
    parser.add_argument("--tokens-time", type=int, default=1024, help="tokens of the measurement of time")
    parser.add_argument("--hidden", type=int, default=1024, help="hidden size")
    parser.add_argument("--vocab", type=int, default=151_936, help="size of the vocabulary")
    parser.add_argument("--repeats", type=int, default=3, help="timed repetitions")
    parser.add_argument("--threads", type=int, default=1, help="number of CPU threads")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="device to measure on")
    print(json.dumps(measure(parser.parse_args())))


if __name__ == "__main__":
    main()
