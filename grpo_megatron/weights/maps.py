"""One declarative map per architecture, for all three name spaces: HF, Megatron, engine.

Import, export, weight sync, reference weights and conversion read these entries and nothing else.
The engine's name and axis are those of SGLang's own fused and sharded parameters, for transfers
that go shard to shard.
"""

from dataclasses import dataclass

from grpo_megatron.megatron.architecture import Architecture
from grpo_megatron.weights.transforms import Copy, FuseGateUp, FuseQKV, PadVocab


@dataclass(frozen=True)
class Entry:
    """One Megatron parameter.

    hf: the HF tensors it is made of. megatron: its name with global layer numbers. axis: the axis
    split over TP, None if every rank has all of it. engine, engine_axis: the same in the engine.
    exported is False for a second copy (the tied embedding on the last pipeline stage).
    """

    hf: tuple[str, ...]
    megatron: str
    axis: int | None
    engine: str
    engine_axis: int | None
    transform: Copy = Copy()
    exported: bool = True


def weight_map(arch: Architecture, tp: int) -> dict[str, Entry]:
    """Megatron name -> Entry, for the whole model in its forward order."""
    entries = {"qwen3": _qwen3}[arch.family](arch, PadVocab(arch.vocab_size, arch.padded_vocab_size(tp)))
    return {entry.megatron: entry for entry in entries}


def _qwen3(arch: Architecture, vocab: PadVocab) -> list[Entry]:
    embedding = "model.embed_tokens.weight"
    entries = [Entry((embedding,), "embedding.word_embeddings.weight", 0, embedding, 0, vocab)]
    for layer in range(arch.num_layers):
        entries += _qwen3_layer(arch, f"model.layers.{layer}", f"decoder.layers.{layer}")
    entries.append(Entry(("model.norm.weight",), "decoder.final_layernorm.weight", None, "model.norm.weight", None))
    if arch.tied_embeddings:
        entries.append(Entry((embedding,), "output_layer.weight", 0, embedding, 0, vocab, exported=False))
    else:
        entries.append(Entry(("lm_head.weight",), "output_layer.weight", 0, "lm_head.weight", 0, vocab))
    return entries


def _qwen3_layer(arch: Architecture, hf: str, megatron: str) -> list[Entry]:
    def same(hf_name: str, megatron_name: str, axis: int | None) -> Entry:
        return Entry((f"{hf}.{hf_name}",), f"{megatron}.{megatron_name}", axis, f"{hf}.{hf_name}", axis)

    qkv = FuseQKV(arch.num_heads, arch.num_kv_heads, arch.head_dim)
    attention, mlp = f"{hf}.self_attn", f"{hf}.mlp"
    return [
        same("input_layernorm.weight", "input_layernorm.weight", None),
        Entry(
            tuple(f"{attention}.{name}_proj.weight" for name in "qkv"),
            f"{megatron}.self_attention.linear_qkv.weight",
            0,
            f"{attention}.qkv_proj.weight",
            0,
            qkv,
        ),
        same("self_attn.q_norm.weight", "self_attention.q_layernorm.weight", None),
        same("self_attn.k_norm.weight", "self_attention.k_layernorm.weight", None),
        same("self_attn.o_proj.weight", "self_attention.linear_proj.weight", 1),
        same("post_attention_layernorm.weight", "pre_mlp_layernorm.weight", None),
        Entry(
            (f"{mlp}.gate_proj.weight", f"{mlp}.up_proj.weight"),
            f"{megatron}.mlp.linear_fc1.weight",
            0,
            f"{mlp}.gate_up_proj.weight",
            0,
            FuseGateUp(),
        ),
        same("mlp.down_proj.weight", "mlp.linear_fc2.weight", 1),
    ]
