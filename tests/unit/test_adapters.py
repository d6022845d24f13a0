"""Adapters in the weight map: PEFT's names, and parameters that cannot have any."""

import dataclasses

from grpo_megatron.config.lora import LoraConfig
from grpo_megatron.model.adapters import adapter_entries, without_adapter
from grpo_megatron.model.architecture import Latent, MoE
from grpo_megatron.model.families import weight_map
from tests.unit.test_parallel_sizes import ARCH

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]


def with_experts(family):
    moe = MoE(num_experts=4, top_k=2, ffn_hidden_size=96, normalize=True, layers=(True,) * ARCH.num_layers)
    return dataclasses.replace(ARCH, family=family, moe=moe)


def test_an_adapter_has_the_names_and_shapes_of_peft():
    entries = adapter_entries(weight_map(ARCH).values(), LoraConfig(rank=8))
    tensors = {
        hf: shape for entry in entries.values() for hf, shape in zip(entry.hf, entry.shapes, strict=True)
    }
    assert len(tensors) == ARCH.num_layers * 7 * 2
    hidden, ffn, kv = ARCH.hidden_size, ARCH.ffn_hidden_size, ARCH.num_kv_heads * ARCH.head_dim
    layer = "base_model.model.model.layers.1"
    assert tensors[f"{layer}.self_attn.k_proj.lora_A.weight"] == (8, hidden)
    assert tensors[f"{layer}.self_attn.k_proj.lora_B.weight"] == (kv, 8)
    assert tensors[f"{layer}.mlp.down_proj.lora_A.weight"] == (8, ffn)
    assert tensors[f"{layer}.mlp.down_proj.lora_B.weight"] == (hidden, 8)
    assert (
        entries["decoder.layers.1.self_attention.linear_qkv.lora_a"].hf[2]
        == f"{layer}.self_attn.v_proj.lora_A.weight"
    )


def test_without_rank_there_are_none():
    assert adapter_entries(weight_map(ARCH).values(), LoraConfig()) == {}


def test_experts_cannot_have_adapters():
    found = without_adapter(with_experts("qwen3_moe"), LoraConfig(rank=8))
    assert [sentence.split()[1] for sentence in found] == ["gate_proj", "up_proj", "down_proj"]
    assert all("belongs to the experts" in sentence for sentence in found)
    found = without_adapter(with_experts("mixtral"), LoraConfig(rank=8, targets=["down_proj"]))
    assert found == [
        "megatron.lora.targets: this model has no layer down_proj outside its experts; remove down_proj"
    ]
    for family in ("qwen3_moe", "mixtral"):
        assert without_adapter(with_experts(family), LoraConfig(rank=8, targets=ATTENTION)) == []
    assert without_adapter(ARCH, LoraConfig(rank=8)) == []


def test_latent_attention_cannot_have_adapters():
    latent = Latent(query_rank=None, kv_rank=16, plain_dim=16, rotated_dim=8, value_dim=16)
    (sentence,) = without_adapter(
        dataclasses.replace(ARCH, latent=latent), LoraConfig(rank=8, targets=ATTENTION)
    )
    assert "multi-head latent attention" in sentence
