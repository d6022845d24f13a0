"""Functions that tests/parallel/test_attention.py runs on each rank, and plain float64 attention to
compare with.
"""

from dataclasses import dataclass
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist

from grpo_megatron.batch.layout import Layout
from grpo_megatron.megatron.layers import packs
from grpo_megatron.megatron.layers.attention import PackedAttention
from grpo_megatron.megatron.layers.packs import describe_pack
from tests.parallel.heads import Recorder

# What padding holds: a query that saw it would be far off.
PADDING = 30.0


@dataclass(frozen=True)
class Problem:
    """One pack of sequences. The tensors are the same on every rank and in the test."""

    lengths: tuple[int, ...] = (37, 5, 64, 1, 40, 33, 2, 12)
    """Tokens of each sequence."""
    heads: int = 8
    """Query heads."""
    kv_heads: int = 2
    """Key and value heads."""
    dim: int = 16
    """Size of a head."""
    alignment: int = 1
    """See Layout. Beyond 1 there is padding."""
    equal_only: bool | None = None
    """See describe_pack."""
    window: int | None = None
    """See PackedAttention."""
    masked_queries: int | None = None
    """Number of queries that share a mask; None: the usual number."""
    sinks: bool = False
    """See PackedAttention."""

    @property
    def frequencies(self) -> torch.Tensor:
        return 100.0 ** (-torch.arange(0, self.dim, 2, dtype=torch.float32) / self.dim)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return query, key and value, float32 [T, (kv_)heads, d], and grad [T, heads * d], that of the
        output; with sinks also these, [heads].
        """
        generator = torch.Generator().manual_seed(3)
        count = sum(self.lengths)
        shapes = dict.fromkeys(("key", "value"), (count, self.kv_heads, self.dim))
        shapes |= {"query": (count, self.heads, self.dim), "grad": (count, self.heads * self.dim)}
        shapes |= {"sinks": (self.heads,)} if self.sinks else {}
        return {name: torch.randn(*shape, generator=generator) for name, shape in shapes.items()}


def _rotated(x: torch.Tensor, frequencies: torch.Tensor) -> torch.Tensor:
    """Rotate the pairs (i, i + d/2) of x [l, heads, d] by position times frequency, as complex numbers."""
    angle = torch.arange(len(x), dtype=x.dtype)[:, None] * frequencies.to(x.dtype)
    turned = torch.complex(*x.chunk(2, -1)) * torch.polar(torch.ones_like(angle), angle)[:, None]
    return torch.cat([turned.real, turned.imag], -1)


def exact(problem: Problem) -> dict[str, np.ndarray]:
    """Return the output [T, heads * d] and the gradients of all inputs, computed by sequence in float64."""
    tensors = {name: tensor.double() for name, tensor in problem.tensors().items()}
    names = [name for name in tensors if name != "grad"]
    inputs = [tensors[name].requires_grad_() for name in ("query", "key", "value")]
    sinks = tensors["sinks"].requires_grad_() if problem.sinks else None
    outputs = []
    for query, key, value in zip(*(tensor.split(problem.lengths) for tensor in inputs), strict=True):
        query, key = (_rotated(x, problem.frequencies) for x in (query, key))
        key, value = (x.repeat_interleave(problem.heads // problem.kv_heads, dim=1) for x in (key, value))
        scores = torch.einsum("qhd,khd->hqk", query, key) / problem.dim**0.5
        everything = torch.ones(len(query), len(query), dtype=torch.bool)
        hidden = everything.triu(1) | everything.tril(-(problem.window or len(query)))
        scores = scores.masked_fill(hidden, -torch.inf)
        if sinks is not None:
            scores = torch.cat([scores, sinks[:, None, None].expand(-1, len(query), 1)], dim=-1)
        share = scores.softmax(-1)[..., : len(query)]
        outputs.append(torch.einsum("hqk,khd->qhd", share, value).flatten(1))
    output = torch.cat(outputs)
    (output * tensors["grad"]).sum().backward()
    values = {"output": output.detach(), **{name: tensors[name].grad for name in names}}
    return {name: value.numpy() for name, value in values.items()}


def config(problem: Problem, cp: int = 1):
    """Return Megatron's TransformerConfig of one such layer."""
    from megatron.core.transformer import TransformerConfig  # not before grpo_megatron.megatron is imported

    return TransformerConfig(
        num_layers=1,
        hidden_size=problem.heads * problem.dim,
        num_attention_heads=problem.heads,
        num_query_groups=problem.kv_heads,
        kv_channels=problem.dim,
        context_parallel_size=cp,
        attention_dropout=0.0,
        use_cpu_initialization=True,
    )


class OneRank:
    """This rank's part of the problem, and the attention over it."""

    def __init__(self, problem: Problem):
        cp = dist.get_world_size()
        self.attention = PackedAttention(
            config(problem, cp),
            1,
            None,
            "self",
            rope_frequencies=problem.frequencies,
            window=problem.window,
            sinks=problem.sinks,
        )
        self.pack = Layout(cp=cp, cp_rank=dist.get_rank(), alignment=problem.alignment).pack(problem.lengths)
        with patch.object(packs, "_MASKED_QUERIES", problem.masked_queries or packs._MASKED_QUERIES):
            self.packed = describe_pack(self.pack, torch.device("cpu"), equal_only=problem.equal_only)
        tensors = problem.tensors()
        self.grad = self.pack.scatter(tensors.pop("grad").numpy())
        if problem.sinks:
            self.attention.softmax_offset.data.copy_(tensors.pop("sinks"))
        self.inputs = {
            name: self.pack.scatter(x.numpy(), fill=PADDING).requires_grad_() for name, x in tensors.items()
        }

    def forward(self) -> torch.Tensor:
        return self.attention(**self.inputs, packed_seq_params=self.packed)


def values_and_gradients(problem: Problem) -> dict[str, np.ndarray]:
    """Return index [t] (see Pack) and, by name, the output and the gradients of the inputs, float32 [t,
    ...], and with sinks this rank's part of their gradient, [heads].
    """
    rank = OneRank(problem)
    output = rank.forward()
    output.backward(rank.grad)
    gradients = {name: tensor.grad.numpy() for name, tensor in rank.inputs.items()}
    if problem.sinks:
        gradients["sinks"] = rank.attention.softmax_offset.grad.numpy()
    return {"index": rank.pack.index, "output": output.detach().numpy(), **gradients}


def joint_norm(tensors: dict[str, torch.Tensor], eps: float) -> dict[str, torch.Tensor]:
    """Return this TP rank's output of JointRMSNorm and the gradients of its input and weight.

    tensors: x and grad [t, 1, heads, d], weight [heads * d], of all ranks.
    """
    from grpo_megatron.megatron.layers.joint_norm import JointRMSNorm

    rank, size = dist.get_rank(), dist.get_world_size()
    x, grad = (tensors[name].chunk(size, dim=2)[rank].contiguous() for name in ("x", "grad"))
    norm = JointRMSNorm(config(Problem()), x.shape[-1], eps, heads=tensors["x"].shape[2])
    norm.weight.data.copy_(tensors["weight"].chunk(size)[rank])
    output = norm(x.requires_grad_())
    output.backward(grad)
    return {"output": output.detach(), "x": x.grad, "weight": norm.weight.grad}


@dataclass
class Recorded:
    """Measurements of the forward and backward pass.

    largest: elements of the largest tensor that any operation returned.
    batches: number of batches that were computed.
    calls: operations on attention scores, {name: number of calls}, forward and backward together.
    """

    largest: int
    batches: int
    calls: dict[str, int]


def recorded(problem: Problem) -> Recorded:
    rank = OneRank(problem)
    with Recorder() as recorder:
        rank.forward().backward(rank.grad)
    calls = {
        name: n
        for name, n in recorder.calls.items()
        if "attention" in name or "softmax" in name or "bmm" in name
    }
    return Recorded(recorder.largest, len(rank.packed.batches), calls)
