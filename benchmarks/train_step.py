"""Measure tokens per second of an optimizer step: packed against one padded sequence per row.

    python benchmarks/train_step.py [--steps N] [--sequences S] [--family qwen3|qwen3_5|qwen3_next]

One rank, float32, one CPU thread, a Qwen3 of 2.5M parameters or a model of another family with the same
sizes, micro-batches of at most 4096 positions. The rate is that of real tokens (padding is not counted) in
whole steps: layout, forward, backward, optimizer. Seconds are CPU time, which other load on the machine
affects least. The sides differ only in their micro-batches:

    packed                   sequences one after the other, nothing padded
    padded                   rows of one sequence, all as long as the longest of the batch; padding runs
                             through all layers and the head like real tokens, and counts against the 4096
    padded_per_micro_batch   the same, but rows are as long as the longest of their micro-batch; in the order
                             of the batch
    unpacked                 one sequence per micro-batch, nothing padded

Lengths are like those of GSM8K with a chat template, answered by an instruct model. Prompts are log-normal
with median 110 and sigma 0.35, within 60 to 250. Responses are log-normal with mean 220 and sigma 0.6, within
16 to 1024. Groups of 8 share a prompt.

Each side trains its own actor from the same weights. After a warm-up they take turns, step by step, so that a
slow phase of the machine affects all. Loss and gradient norm of every step must agree to 1e-4, or the
benchmark fails.

Prints a table and, as its last line, one JSON object:

    packed_speedup                packed / padded
    SIDE_tokens_per_second        median, for each side
    SIDE_positions_per_token      positions computed per real token, for the two padded sides
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tools"))
from make_tiny_model import make

from grpo_megatron.algorithm.losses import PolicyLoss
from grpo_megatron.batch.layout import Layout, Pack
from grpo_megatron.batch.sample import Sample
from grpo_megatron.batch.schedule import schedule
from grpo_megatron.batch.train_batch import TrainBatch
from grpo_megatron.config.algorithm import AlgorithmConfig
from grpo_megatron.config.schema import Config, MegatronConfig, ModelConfig, OptimizerConfig, Precision
from grpo_megatron.megatron import process_groups
from grpo_megatron.megatron.actor import Actor
from grpo_megatron.megatron.results import TrainResult
from grpo_megatron.metrics import to_floats
from grpo_megatron.model.parallel_sizes import ParallelSizes

MAX_TOKENS = 4096
MAX_RESPONSE = 1024
GROUP = 8
TOLERANCE = 1e-4
# Arguments of tools/make_tiny_model.py for each family.
FAMILIES = {"qwen3": {}, "qwen3_5": {"delta": True}, "qwen3_next": {"delta": True, "experts": 4}}
LOSS = PolicyLoss(AlgorithmConfig(entropy_coeff=0.01))


@dataclass(frozen=True)
class Rows(Layout):
    """A layout in which every sequence is padded to a row of its own.

    length: number of tokens of a row. None: that of the longest sequence of the micro-batch.
    """

    length: int | None = None

    def pack(self, lengths) -> Pack:
        lengths = np.asarray(lengths, dtype=np.int64)
        row = lengths.max() if self.length is None else self.length
        if lengths.max() > row:
            raise ValueError(f"a sequence of {lengths.max()} tokens does not fit rows of {row}")
        return Pack(self, lengths, np.full_like(lengths, row))


@dataclass
class Side:
    """One way to lay out the batch, and what was measured with it."""

    name: str
    """Name of the side, such as "packed"."""
    layout: Layout
    """Layout that the actor uses."""
    micro_batches: list[TrainBatch]
    """The batch, divided into micro-batches."""
    actor: Actor
    """The actor that trains with this layout."""
    rates: list[float] = field(default_factory=list)
    """Real tokens per second of each step."""

    @property
    def positions(self) -> int:
        """Number of positions that each layer computes for the whole batch, including padding."""
        return sum(int(self.layout.pack(mb.lengths).padded_lengths.sum()) for mb in self.micro_batches)

    def warm_up(self, tokens: int) -> None:
        """Compute the gradients of the first micro-batch once. The weights do not change."""
        self.actor.passes.compute_gradients(self.micro_batches[:1], LOSS, tokens)

    def step(self, tokens: int) -> TrainResult:
        start = time.process_time()
        result = self.actor.passes.train_step(self.micro_batches, LOSS, tokens)
        self.rates.append(tokens / (time.process_time() - start))
        return result


def gsm8k_like_lengths(count: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Return the prompt and the response length of each sequence in tokens, both int64 [count]."""
    prompts = np.repeat(rng.lognormal(np.log(110), 0.35, -(-count // GROUP)), GROUP)[:count]
    sigma = 0.6
    responses = rng.lognormal(np.log(220) - sigma**2 / 2, sigma, count)
    return prompts.astype(int).clip(60, 250), responses.astype(int).clip(16, MAX_RESPONSE)


def random_batch(count: int, seed: int = 0) -> TrainBatch:
    rng = np.random.default_rng(seed)
    # -3.4 is about the log-prob of one of 30 words. Ratios then differ, some are clipped, and the loss
    # depends on the model.
    return batch_of(*gsm8k_like_lengths(count, rng), rng, words=range(6, 29), old_logp=-3.4)


def batch_of(
    prompts: np.ndarray, responses: np.ndarray, rng: np.random.Generator, words: range, old_logp: float
) -> TrainBatch:
    """Return a batch of random tokens, advantages and old log-probs.

    prompts, responses: numbers of prompt and response tokens of each sequence, int [S].
    words: range of the token ids.
    old_logp: mean of the old log-probs.
    """
    samples = [
        Sample.of(
            group_id=i // GROUP,
            trajectory_id=i,
            prompt_ids=rng.integers(words.start, words.stop, prompt).astype(np.int32),
            response_ids=rng.integers(words.start, words.stop, response).astype(np.int32),
            loss_mask=np.ones(response, dtype=np.bool_),
            rollout_logprobs=np.full(response, old_logp, dtype=np.float32),
            finish_reason="stop",
        )
        for i, (prompt, response) in enumerate(zip(prompts, responses, strict=True))
    ]
    batch = TrainBatch.from_samples(samples)
    batch.weight = (batch.loss_mask / batch.loss_mask.sum()).astype(np.float32)
    batch.advantage = np.where(batch.loss_mask, rng.normal(size=batch.num_tokens), 0).astype(np.float32)
    batch.old_logp = np.where(batch.loss_mask, rng.normal(old_logp, 0.3, batch.num_tokens), 0).astype(
        np.float32
    )
    return batch


def part_of(batch: TrainBatch, sequences: Sequence[int]) -> TrainBatch:
    """Return a batch with some of the sequences, in the given order.

    sequences: indices of the sequences in `batch`.
    """
    rows, ends = list(sequences), batch.cu_seqlens
    tokens = np.concatenate([np.arange(ends[i], ends[i + 1]) for i in rows])
    columns = {name: getattr(batch, name)[rows] for name in ("group_id", "trajectory_id", "reward")}
    for name in ("loss_mask", "weight", "advantage", "rollout_logp", "old_logp", "ref_logp"):
        columns[name] = getattr(batch, name)[tokens]
    return TrainBatch.of([batch.tokens[ends[i] : ends[i + 1]] for i in rows], **columns)


def in_order(lengths: np.ndarray, row: int | None) -> list[list[int]]:
    """Fill micro-batches with the sequences in the order of the batch. Return the indices in each of them.

    A micro-batch gets as many padded rows as fit into MAX_TOKENS.

    row: length of a row in tokens. None: that of the longest sequence of the micro-batch.
    """
    parts: list[list[int]] = [[]]
    for i in range(len(lengths)):
        longest = row or max(lengths[j] for j in (*parts[-1], i))
        if longest * (len(parts[-1]) + 1) > MAX_TOKENS:
            parts.append([])
        parts[-1].append(i)
    return parts


def make_sides(batch: TrainBatch, folder: str) -> list[Side]:
    lengths = batch.lengths
    longest = int(lengths.max())
    partitions = {
        "packed": (Layout(), schedule(lengths, MAX_TOKENS).micro_batches[0]),
        "padded": (Rows(length=longest), in_order(lengths, longest)),
        "padded_per_micro_batch": (Rows(), in_order(lengths, None)),
        "unpacked": (Layout(), schedule(lengths, MAX_TOKENS, packing=False).micro_batches[0]),
    }
    config = Config(
        model=ModelConfig(path=folder),
        megatron=MegatronConfig(precision=Precision.fp32),
        optimizer=OptimizerConfig(lr=1e-4),
    )
    sides = []
    for name, (layout, partition) in partitions.items():
        actor = Actor(config)
        actor.passes.prepared.layout = layout
        sides.append(Side(name, layout, [part_of(batch, part) for part in partition], actor))
    return sides


def check_equal(results: dict[str, TrainResult]) -> None:
    """Check that every side has the packed side's loss and gradient norm, up to TOLERANCE.

    Raises AssertionError otherwise.

    results: {side: result of its optimizer step}.
    """
    values = {
        name: (to_floats(result.metrics)["actor/loss"], result.grad_norm) for name, result in results.items()
    }
    for name, found in values.items():
        np.testing.assert_allclose(
            found, values["packed"], rtol=TOLERANCE, err_msg=f"loss, gradient norm of {name}"
        )


def measure(options: argparse.Namespace) -> list[Side]:
    batch = random_batch(options.sequences)
    with tempfile.TemporaryDirectory() as folder:
        make(Path(folder, "model"), hidden=256, layers=4, heads=8, ffn=512, **FAMILIES[options.family])
        process_groups.initialize(ParallelSizes(), 0, f"file://{folder}/store", seed=0)
        sides = make_sides(batch, f"{folder}/model")
        for side in sides:
            side.warm_up(batch.num_tokens)
        for _ in range(options.steps):
            check_equal({side.name: side.step(batch.num_tokens) for side in sides})
        process_groups.destroy()
    return sides


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=3, help="measured steps of each side")
    parser.add_argument("--sequences", type=int, default=128, help="sequences of a batch")
    parser.add_argument("--family", choices=FAMILIES, default="qwen3", help="family of the model")
    options = parser.parse_args()
    torch.set_num_threads(1)
    sides = measure(options)
    tokens = sides[0].positions
    print(f"{options.sequences} sequences, {tokens} tokens; real tokens per second")
    print(f"{'':<24}{'median':>10}{'min':>10}{'max':>10}{'micro-batches':>16}{'positions per token':>22}")
    result = {}
    for side in sides:
        rate = result[f"{side.name}_tokens_per_second"] = statistics.median(side.rates)
        print(
            f"{side.name:<24}{rate:>10.0f}{min(side.rates):>10.0f}{max(side.rates):>10.0f}"
            f"{len(side.micro_batches):>16}{side.positions / tokens:>22.2f}"
        )
    packed = result["packed_tokens_per_second"]
    positions = {f"{side.name}_positions_per_token": side.positions / tokens for side in sides[1:3]}
    print(json.dumps({"packed_speedup": packed / result["padded_tokens_per_second"], **result, **positions}))


if __name__ == "__main__":
    main()
