"""Sections about training: speed and memory of steps and log-prob passes, and the error of FP8."""

from pathlib import Path

import numpy as np
import torch

from grpo_megatron.algorithm.losses import PolicyLoss
from grpo_megatron.batch.sample import Sample
from grpo_megatron.batch.train_batch import TrainBatch
from grpo_megatron.config.algorithm import AlgorithmConfig
from grpo_megatron.megatron.actor import Actor
from grpo_megatron.megatron.state.hf_weights import iterate_hf
from on_gpu.actors import PRECISIONS, batches, config_of, micro_batches, one_rank, problem_of, random_actor
from on_gpu.bench import Bench, parameters
from on_gpu.device import seconds, slowest_operations

LOSS = PolicyLoss(AlgorithmConfig(entropy_coeff=0.01))
# A training step has three matrix products for each one of a forward pass, because the backward pass computes
# the gradients of activations and of weights.
_TRAINING = 3


def shape(bench: Bench, name: str) -> None:
    """Measure one model in all precisions, with as many of its layers as fit.

    FLOPs are those of Architecture.cost_model: two per token and weight of a product, head included, and the
    causal pairs of attention. A training step has three times as many. Recomputation in the backward pass
    does not count.
    """
    layers = bench.fitting_layers(name)
    with one_rank(), bench.model(name, layers) as folder:
        in_bf16: dict[str, np.ndarray] = {}
        for precision in PRECISIONS:
            if problem := problem_of(bench, precision):
                bench.report(**{precision: {"skipped": problem}})
                continue
            actor = random_actor(config_of(bench, folder, precision))
            bench.report(
                layers=layers,
                parameters=parameters(actor.model.arch),
                transformer_engine=actor.model.transformer_engine,
            )
            _measure(bench, actor, precision, in_bf16)
            del actor
            bench.device.give_back()
    for precision in PRECISIONS:
        for batch in ("gsm8k", "long"):
            found = bench.figures[precision].get(batch)
            if found and precision != "bf16":
                ratio = found["tokens_per_second"] / bench.figures["bf16"][batch]["tokens_per_second"]
                bench.report(**{f"{precision}_over_bf16_{batch}": ratio})


def _measure(bench: Bench, actor: Actor, precision: str, in_bf16: dict[str, np.ndarray]) -> None:
    """Measure one precision.

    in_bf16: {batch: log-probs before any step}. Filled in bf16, compared with in FP8.
    """
    sides = {
        name: (batch, micro_batches(batch, actor, bench.sizes.tokens))
        for name, batch in batches(bench.sizes, actor.model.arch.vocab_size).items()
    }
    found: dict = {}
    for name, (_, parts) in sides.items():
        values = actor.passes.logprobs(parts)
        difference = np.abs(values - in_bf16.setdefault(name, values)).mean()
        found[f"mean_logp_difference_{name}"] = float(difference)
    for index, (name, (batch, parts)) in enumerate(sides.items()):
        found[name] = _rates(bench, actor, batch, parts, key=(0, index))
        bench.report(**{precision: found})
    if precision == "bf16":
        bench.report(
            slowest_operations=slowest_operations(
                bench.device, lambda: _step(actor, batch, parts, key=(0, index))
            )
        )


def _step(actor: Actor, batch: TrainBatch, parts: list[TrainBatch], key: tuple[int, int]) -> None:
    result = actor.passes.train_step(parts, LOSS, batch.num_tokens, current_is_old=True, key=key)
    if result.dropped:
        raise RuntimeError(f"the step was dropped: its gradient norm is {result.grad_norm}")


def _rates(
    bench: Bench, actor: Actor, batch: TrainBatch, parts: list[TrainBatch], key: tuple[int, int]
) -> dict:
    flops, repeats = float(actor.model.arch.cost_model.flops(batch.lengths).sum()), bench.sizes.repeats

    def step() -> None:
        _step(actor, batch, parts, key)

    step()  # the first step creates the optimizer's states
    peak = bench.device.peak_during(step)
    training = seconds(bench.device, step, repeats, warm_up=0)
    logprobs = seconds(bench.device, lambda: actor.passes.logprobs(parts, key=key), repeats, warm_up=1)
    return {
        "tokens": batch.num_tokens,
        "micro_batches": len(parts),
        "step_seconds": training,
        "tokens_per_second": batch.num_tokens / training,
        "mfu": bench.share_of_peak(_TRAINING * flops, training),
        "logprob_seconds": logprobs,
        "logprob_mfu": bench.share_of_peak(flops, logprobs),
        "peak_gb": peak / 1e9,
    }


def repeat(bench: Bench) -> None:
    """Repeat three steps from the same weights, and report the share of weights whose bits differ."""
    with one_rank(), bench.model("qwen3-0.6b", bench.sizes.layers) as folder:
        for precision in PRECISIONS:
            if problem := problem_of(bench, precision):
                bench.report(**{precision: {"skipped": problem}})
                continue
            first, second = (_weights_after_steps(bench, folder, precision) for _ in range(2))
            differ = sum(int((first[name] != second[name]).sum()) for name in first)
            share = differ / sum(weight.numel() for weight in first.values())
            bench.report(**{precision: {"equal": not differ, "share_of_weights_that_differ": share}})


def _weights_after_steps(
    bench: Bench, folder: str, precision: str, steps: int = 3
) -> dict[str, torch.Tensor]:
    actor = random_actor(config_of(bench, folder, precision))
    batch = batches(bench.sizes, actor.model.arch.vocab_size)["gsm8k"]
    parts = micro_batches(batch, actor, bench.sizes.tokens)
    for step in range(steps):
        _step(actor, batch, parts, key=(0, step))
    weights = {
        name: tensor.to("cpu", copy=True)
        for name, tensor in iterate_hf(actor.model.chunks, actor.model.entries)
    }
    del actor
    bench.device.give_back()
    return weights


def fp8_error(bench: Bench) -> None:
    """Measure how far log-probs in FP8 are from those in bf16, on a trained model (--trained FOLDER).

    The text is that of this project's docs.
    """
    folder = bench.options.trained
    if folder is None:
        bench.report(skipped="no trained model was given (--trained FOLDER)")
        return
    if problem := bench.here.fp8_problem:
        bench.report(skipped=problem)
        return
    batch = _text(folder, bench.sizes.tokens // 4)
    values = {}
    with one_rank():
        for precision in PRECISIONS:
            actor = Actor(config_of(bench, folder, precision))
            parts = micro_batches(batch, actor, bench.sizes.tokens)
            values[precision] = actor.passes.logprobs(parts)
            del actor
            bench.device.give_back()
    bench.report(tokens=batch.num_tokens, mean_logp=float(values["bf16"].mean()))
    for precision, logp in values.items():
        difference = np.abs(logp - values["bf16"])
        bench.report(
            **{precision: {"mean_difference": float(difference.mean()), "largest": float(difference.max())}}
        )


def _text(folder: str, length: int, sequences: int = 8) -> TrainBatch:
    from transformers import AutoTokenizer

    pages = sorted((Path(__file__).resolve().parents[2] / "docs").glob("*.md"))
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    ids = AutoTokenizer.from_pretrained(folder)(text, verbose=False)["input_ids"][: length * sequences]
    pieces = np.array_split(np.asarray(ids, dtype=np.int32), sequences)
    return TrainBatch.from_samples(
        [
            Sample.of(
                0,
                i,
                piece[:1],
                piece[1:],
                np.ones(len(piece) - 1, np.bool_),
                np.zeros(len(piece) - 1, np.float32),
                "stop",
            )
            for i, piece in enumerate(pieces)
        ]
    )
