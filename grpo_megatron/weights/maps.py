"""One declarative map per architecture, for all three name spaces: HF, Megatron, engine.

Import, export, weight sync, reference weights and conversion read these entries and nothing else.
The engine's name and axis are those of SGLang's own fused and sharded parameters, for transfers
that go shard to shard.
"""

from dataclasses import dataclass, replace

from grpo_megatron.errors import UserError
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


def weight_map(arch: Architecture, tp: int, transformer_engine: bool = False) -> dict[str, Entry]:
    """Megatron name -> Entry, for the whole model in its forward order.

    transformer_engine: its layers hold each norm in the linear layer behind it, under another name.

    Llama, Mistral, Qwen2 and Qwen3 name their parts alike; q/k norms and the QKV bias are there or
    not. Raises UserError for a family without a map.
    """
    maps = dict.fromkeys(("llama", "mistral", "qwen2", "qwen3"), _llama_like)
    if arch.family not in maps:
        raise UserError(f"there is no weight map for the family {arch.family!r}; mapped: {', '.join(maps)}")
    entries = maps[arch.family](arch, PadVocab(arch.vocab_size, arch.padded_vocab_size(tp)))
    if transformer_engine:
        entries = [replace(entry, megatron=_transformer_engine_name(entry.megatron)) for entry in entries]
    return {entry.megatron: entry for entry in entries}


def _transformer_engine_name(name: str) -> str:
    for local, fused in (
        ("input_layernorm.", "self_attention.linear_qkv.layer_norm_"),
        ("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_"),
    ):
        name = name.replace(f".{local}", f".{fused}")
    return name


def _llama_like(arch: Architecture, vocab: PadVocab) -> list[Entry]:
    embedding = "model.embed_tokens.weight"
    entries = [Entry((embedding,), "embedding.word_embeddings.weight", 0, embedding, 0, vocab)]
    for layer in range(arch.num_layers):
        entries += _llama_like_layer(arch, f"model.layers.{layer}", f"decoder.layers.{layer}")
    entries.append(Entry(("model.norm.weight",), "decoder.final_layernorm.weight", None, "model.norm.weight", None))
    if arch.tied_embeddings:
        entries.append(Entry((embedding,), "output_layer.weight", 0, embedding, 0, vocab, exported=False))
    else:
        entries.append(Entry(("lm_head.weight",), "output_layer.weight", 0, "lm_head.weight", 0, vocab))
    return entries


def _llama_like_layer(arch: Architecture, hf: str, megatron: str) -> list[Entry]:
    def same(hf_name: str, megatron_name: str, axis: int | None) -> Entry:
        return Entry((f"{hf}.{hf_name}",), f"{megatron}.{megatron_name}", axis, f"{hf}.{hf_name}", axis)

    def qkv(kind: str) -> Entry:
        parts = tuple(f"{hf}.self_attn.{name}_proj.{kind}" for name in "qkv")
        fuse = FuseQKV(arch.num_heads, arch.num_kv_heads, arch.head_dim)
        return Entry(parts, f"{megatron}.self_attention.linear_qkv.{kind}", 0, f"{hf}.self_attn.qkv_proj.{kind}", 0, fuse)

    gate_up = tuple(f"{hf}.mlp.{name}_proj.weight" for name in ("gate", "up"))
    entries = [same("input_layernorm.weight", "input_layernorm.weight", None), qkv("weight")]
    if arch.qkv_bias:
        entries.append(qkv("bias"))
    if arch.qk_norm:
        entries.append(same("self_attn.q_norm.weight", "self_attention.q_layernorm.weight", None))
        entries.append(same("self_attn.k_norm.weight", "self_attention.k_layernorm.weight", None))
    return [
        *entries,
        same("self_attn.o_proj.weight", "self_attention.linear_proj.weight", 1),
        same("post_attention_layernorm.weight", "pre_mlp_layernorm.weight", None),
        Entry(gate_up, f"{megatron}.mlp.linear_fc1.weight", 0, f"{hf}.mlp.gate_up_proj.weight", 0, FuseGateUp()),
        same("mlp.down_proj.weight", "mlp.linear_fc2.weight", 1),
    ]
