"""Impossible layouts. Every broken rule is named, all at once."""

from dataclasses import replace

import pytest
import torch

from grpo_megatron.model.architecture import Architecture, MoE
from grpo_megatron.model.parallel_sizes import ParallelSizes
from grpo_megatron.preflight.check import load_config
from grpo_megatron.preflight.layout import SIZES, SIZES_OF_MODEL

ARCH = Architecture(
    family="llama",
    num_layers=12,
    hidden_size=768,
    ffn_hidden_size=2048,
    num_heads=12,
    num_kv_heads=4,
    head_dim=64,
    vocab_size=1000,
    max_positions=2048,
    rope_theta=1e4,
    rope_scaling=None,
    norm_eps=1e-6,
    qk_norm=False,
    qkv_bias=False,
    tied_embeddings=False,
    dtype=torch.float32,
)
EXPERTS = {"moe": MoE(num_experts=6, top_k=2, ffn_hidden_size=100, normalize=True, layers=(True,) * 12)}

HEADS, KV, FFN, HIDDEN, LAYERS, ROWS = (
    "attention heads",
    "KV heads",
    "intermediate size",
    "hidden size",
    "layers",
    "rows of Q",
)
CASES = [
    ({"tp": 5}, {}, [HEADS, KV, FFN]),
    ({"tp": 8}, {}, [HEADS]),
    ({"tp": 3}, {}, [KV, FFN]),
    ({"tp": 6}, {}, [KV, FFN]),
    ({"tp": 7}, {}, [HEADS, KV, FFN, ROWS]),
    ({"tp": 9}, {}, [HEADS, KV, FFN]),
    ({"tp": 16}, {}, [HEADS]),
    ({"pp": 5}, {}, [LAYERS]),
    ({"pp": 7}, {}, [LAYERS]),
    ({"pp": 24}, {}, [LAYERS]),
    ({"tp": 5, "pp": 5}, {}, [HEADS, KV, FFN, LAYERS]),
    (
        {"tp": 7, "pp": 8, "ep": 5},
        {},
        [HEADS, KV, FFN, LAYERS, "5 does not divide 7", "the model is dense"],
    ),
    ({"vpp": 2}, {}, ["megatron.virtual_pipeline=2"]),
    ({"pp": 2, "vpp": 5}, {}, [LAYERS]),
    ({"pp": 3, "pipeline_layers": (4, 4)}, {}, ["model chunks: 3"]),
    ({"pp": 2, "pipeline_layers": (4, 6)}, {}, ["pipeline_layers=[4, 6], layers: 12"]),
    ({"dp": 2, "ep": 2}, {}, ["the model is dense"]),
    ({"dp": 4, "ep": 4, "etp": 1}, EXPERTS, ["megatron.expert_parallel=4, experts: 6"]),
    ({"dp": 3, "etp": 3}, EXPERTS, ["intermediate size of experts: 100"]),
    ({"tp": 2}, EXPERTS, ["needs megatron.sequence_parallel=true"]),
    ({"sequence_parallel": True}, {}, ["sequence_parallel=true needs"]),
    ({"tp": 7, "sequence_parallel": True}, {}, [HEADS, KV, FFN, HIDDEN]),
    ({"tp": 2}, {"ffn_hidden_size": 2049}, [FFN]),
    ({"tp": 4}, {"num_kv_heads": 6}, [KV]),
    ({"tp": 2, "pp": 2}, {"num_layers": 11, "num_heads": 15, "num_kv_heads": 5}, [HEADS, KV, LAYERS]),
]


def violations(sizes: ParallelSizes, arch: Architecture) -> list[str]:
    return SIZES.violations(sizes) + SIZES_OF_MODEL.violations(sizes, arch)


@pytest.mark.parametrize(("sizes", "changes", "named"), CASES)
def test_all_violations_are_listed(sizes, changes, named):
    found = violations(ParallelSizes(**sizes), replace(ARCH, **changes))
    for what in named:
        assert any(what in sentence for sentence in found), (what, found)


@pytest.mark.parametrize(
    "sizes",
    [
        {},
        {"tp": 2},
        {"tp": 4, "sequence_parallel": True},
        {"tp": 4, "pp": 4},
        {"pp": 12},
        {"tp": 2, "pp": 3, "dp": 5},
        {"cp": 3, "tp": 2},
        {"pp": 2, "vpp": 3},
        {"pp": 3, "pipeline_layers": (5, 4, 3)},
    ],
)
def test_legal_layouts(sizes):
    assert violations(ParallelSizes(**sizes), ARCH) == []


@pytest.mark.parametrize(
    "sizes", [{"dp": 2, "ep": 2}, {"cp": 2, "dp": 3, "ep": 6}, {"tp": 2, "ep": 2, "sequence_parallel": True}]
)
def test_legal_layouts_with_experts(sizes):
    assert violations(ParallelSizes(**sizes), replace(ARCH, **EXPERTS)) == []


def test_chunks_of_a_pipeline():
    assert ParallelSizes(pp=2, vpp=3).chunk_layers(12) == (2, 2, 2, 2, 2, 2)
    assert ParallelSizes(pp=2, pipeline_layers=(5, 7)).chunk_layers(12) == (5, 7)
    assert ParallelSizes(pp=2, vpp=3).stage_layers(12) == ((0, 1, 4, 5, 8, 9), (2, 3, 6, 7, 10, 11))
    assert ParallelSizes(pp=2, pipeline_layers=(1, 3)).stage_layers(4) == ((0,), (1, 2, 3))
    assert ParallelSizes(pp=4, vpp=2).micro_batch_multiple == 4


def test_the_other_configurations_load():
    for name in ("qwen2.5_0.5b_gsm8k", "qwen2.5_0.5b_gsm8k_lora"):
        load_config(f"configs/{name}.yaml", ["model.path=weights"])
    load_config("configs/gsm8k_cpu.yaml", ["data.train=train.jsonl"])
