"""Sections `peak` (fastest product and copy) and `head` (ours against usual ways to compute log-probs)."""

import tempfile

import torch
import torch.nn.functional as F

from on_gpu.bench import Bench
from on_gpu.device import seconds


def peak(bench: Bench) -> None:
    """Measure the fastest bf16 matrix product and a copy in device memory.

    All other figures are compared with these.
    """
    device = bench.device.device
    rates = {}
    for width in bench.sizes.products:
        # Random values, because with zeros the device draws less power and is faster than in training.
        one, other = (torch.randn(width, width, device=device, dtype=torch.bfloat16) for _ in range(2))
        out = torch.empty_like(one)
        taken = seconds(
            bench.device, lambda a=one, b=other, to=out: torch.mm(a, b, out=to), repeats=7, calls=8
        )
        rates[str(width)] = 2 * width**3 / taken
    best = max(rates.values())
    bench.report(
        device=bench.device.name,
        bf16_flops=best,
        bf16_tflops=best / 1e12,
        tflops_by_width={n: rate / 1e12 for n, rate in rates.items()},
    )
    source = torch.randint(256, (bench.sizes.copied,), device=device, dtype=torch.uint8)
    target = torch.empty_like(source)
    taken = seconds(bench.device, lambda: target.copy_(source), repeats=7, calls=4)
    bench.report(copy_gb_per_s=bench.sizes.copied / taken / 1e9)


def head(bench: Bench) -> None:
    """Measure forward and backward pass of a micro-batch's log-probs in bf16.

    Reports the time, and the memory beyond inputs and gradients.
    """
    from grpo_megatron.megatron import process_groups
    from grpo_megatron.model.parallel_sizes import ParallelSizes

    with tempfile.TemporaryDirectory() as folder:
        process_groups.initialize(ParallelSizes(), 0, f"file://{folder}/store", seed=0)
        for name, function in _ways().items():
            _measure_head(bench, name, function)
        process_groups.destroy()
    found = bench.figures
    for other in ("log_softmax", "vocab_parallel_cross_entropy"):
        bench.report(
            **{
                f"time_over_{other}": found["ours"]["seconds"] / found[other]["seconds"],
                f"memory_over_{other}": found["ours"]["bytes"] / max(1, found[other]["bytes"]),
            }
        )


def _ways() -> dict:
    import torch.distributed as dist
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    from grpo_megatron.megatron.head.logprobs import token_logprobs

    def log_softmax(hidden, weight, target):
        logits = F.linear(hidden, weight).float()
        return logits.log_softmax(dim=-1).gather(1, target[:, None])[:, 0]

    def cross_entropy(hidden, weight, target):
        # [tokens, micro-batch, words], like the output of Megatron's output layer
        logits = F.linear(hidden, weight)[:, None]
        return -vocab_parallel_cross_entropy(logits.float(), target[:, None])[:, 0]

    def ours(hidden, weight, target):
        return token_logprobs(
            hidden, weight, target, 1.0, len(weight), dist.group.WORLD, sequence_parallel=False
        ).logp

    return {"log_softmax": log_softmax, "vocab_parallel_cross_entropy": cross_entropy, "ours": ours}


def _measure_head(bench: Bench, name: str, function) -> None:
    tokens, channels, words = bench.sizes.head
    generator = torch.Generator(bench.device.device).manual_seed(0)
    at = {"device": bench.device.device, "dtype": torch.bfloat16}
    hidden = torch.empty(tokens, channels, **at).normal_(generator=generator).requires_grad_()
    weight = (
        torch.empty(words, channels, **at).normal_(0, 2 / channels**0.5, generator=generator).requires_grad_()
    )
    target = torch.randint(words, (tokens,), generator=generator, device=bench.device.device)
    of_logp = torch.empty(tokens, device=bench.device.device).normal_(generator=generator)

    def both_passes():
        hidden.grad = weight.grad = None
        logp = function(hidden, weight, target)
        (logp * of_logp).sum().backward()
        return logp

    taken = seconds(bench.device, both_passes)
    logp = both_passes().detach()
    gradients = bench.device.allocated()  # inputs and gradients exist already
    beyond = bench.device.peak_during(both_passes) - gradients
    # The forward product and the two backward products are 6 FLOPs per weight and token. Ours computes the
    # logits twice.
    share = bench.share_of_peak(6 * tokens * channels * words, taken)
    figures = {"seconds": taken, "bytes": beyond, "share_of_peak": share, "mean_logp": logp.mean().item()}
    bench.report(**{name: figures})
