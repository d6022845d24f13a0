"""One declarative map per architecture, for all three name spaces: HF, Megatron, engine.

Import, export, weight sync, reference weights and conversion read these entries and nothing else.
The engine's name and axis are those of SGLang's own fused and sharded parameters, for transfers
that go shard to shard.
"""

from dataclasses import dataclass, replace

from grpo_megatron.errors import UserError
from grpo_megatron.model.architecture import Architecture
from grpo_megatron.weights.transforms import Copy, FuseGateUp, FuseQKV, PadVocab


@dataclass(frozen=True)
class Entry:
    """One Megatron parameter.

    hf: the HF tensors it is made of. megatron: its name with global layer numbers. axis: the axis
    split over TP, None if every rank has all of it. engine, engine_axis: the same in the engine; of an
    expert, its slice of the engine's stacked tensor. exported is False for a second copy (the tied
    embedding on the last pipeline stage). expert: one expert's parameter, which only the ranks that
    hold this expert have, split over expert-tensor parallel ranks instead.
    """

    hf: tuple[str, ...]
    megatron: str
    axis: int | None
    engine: str
    engine_axis: int | None
    transform: Copy = Copy()
    exported: bool = True
    expert: bool = False


def weight_map(arch: Architecture, tp: int, transformer_engine: bool = False) -> dict[str, Entry]:
    """Megatron name -> Entry, for the whole model in its forward order.

    transformer_engine: its layers hold each norm in the linear layer behind it, under another name.

    All families name attention, norms and dense MLPs alike; q/k norms and the QKV bias are there or
    not. Their experts have names of their own. Raises UserError for a family without a map.
    """
    if arch.family not in ("llama", "mistral", "qwen2", "qwen3", *_EXPERT_NAMES):
        raise UserError(f"there is no weight map for the family {arch.family!r}")
    entries = _model(arch, PadVocab(arch.vocab_size, arch.padded_vocab_size(tp)))
    if transformer_engine:
        entries = [replace(entry, megatron=_transformer_engine_name(entry.megatron, arch)) for entry in entries]
    return {entry.megatron: entry for entry in entries}


def _transformer_engine_name(name: str, arch: Architecture) -> str:
    fused = {"input_layernorm.": "self_attention.linear_qkv.layer_norm_"}
    layer = name.removeprefix("decoder.layers.").split(".")[0]
    if arch.moe is None or (layer.isdigit() and not arch.moe.layers[int(layer)]):
        fused["pre_mlp_layernorm."] = "mlp.linear_fc1.layer_norm_"  # a router's norm stays on its own
    for local, within in fused.items():
        name = name.replace(f".{local}", f".{within}")
    return name


def _model(arch: Architecture, vocab: PadVocab) -> list[Entry]:
    embedding = "model.embed_tokens.weight"
    entries = [Entry((embedding,), "embedding.word_embeddings.weight", 0, embedding, 0, vocab)]
    for layer in range(arch.num_layers):
        hf, megatron = f"model.layers.{layer}", f"decoder.layers.{layer}"
        entries += _attention(arch, hf, megatron)
        has_experts = arch.moe is not None and arch.moe.layers[layer]
        entries += _experts(arch, hf, megatron) if has_experts else _dense_mlp(hf, megatron)
    entries.append(Entry(("model.norm.weight",), "decoder.final_layernorm.weight", None, "model.norm.weight", None))
    if arch.tied_embeddings:
        entries.append(Entry((embedding,), "output_layer.weight", 0, embedding, 0, vocab, exported=False))
    else:
        entries.append(Entry(("lm_head.weight",), "output_layer.weight", 0, "lm_head.weight", 0, vocab))
    return entries


def _same(hf: str, megatron: str, axis: int | None) -> Entry:
    return Entry((hf,), megatron, axis, hf, axis)


def _attention(arch: Architecture, hf: str, megatron: str) -> list[Entry]:
    """Both norms of a layer and what is between them."""

    def same(hf_name: str, megatron_name: str, axis: int | None) -> Entry:
        return _same(f"{hf}.{hf_name}", f"{megatron}.{megatron_name}", axis)

    def qkv(kind: str) -> Entry:
        parts = tuple(f"{hf}.self_attn.{name}_proj.{kind}" for name in "qkv")
        fuse = FuseQKV(arch.num_heads, arch.num_kv_heads, arch.head_dim)
        return Entry(parts, f"{megatron}.self_attention.linear_qkv.{kind}", 0, f"{hf}.self_attn.qkv_proj.{kind}", 0, fuse)

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
    ]


def _dense_mlp(hf: str, megatron: str) -> list[Entry]:
    gate_up = tuple(f"{hf}.mlp.{name}_proj.weight" for name in ("gate", "up"))
    return [
        Entry(gate_up, f"{megatron}.mlp.linear_fc1.weight", 0, f"{hf}.mlp.gate_up_proj.weight", 0, FuseGateUp()),
        _same(f"{hf}.mlp.down_proj.weight", f"{megatron}.mlp.linear_fc2.weight", 1),
    ]


# family -> (the block's name, gate, up and down projection of an expert)
_EXPERT_NAMES = {
    "qwen3_moe": ("mlp", "gate_proj", "up_proj", "down_proj"),
    "mixtral": ("block_sparse_moe", "w1", "w3", "w2"),
}


def _experts(arch: Architecture, hf: str, megatron: str) -> list[Entry]:
    block, gate, up, down = _EXPERT_NAMES[arch.family]
    entries = [_same(f"{hf}.{block}.gate.weight", f"{megatron}.mlp.router.weight", None)]
    engine = f"{hf}.{block}.experts"
    for number in range(arch.moe.num_experts):
        theirs, ours = f"{hf}.{block}.experts.{number}", f"{megatron}.mlp.experts.local_experts.{number}"
        gate_up = (f"{theirs}.{gate}.weight", f"{theirs}.{up}.weight")
        entries += [
            Entry(gate_up, f"{ours}.linear_fc1.weight", 0, f"{engine}.w13_weight", 0, FuseGateUp(), expert=True),
            Entry((f"{theirs}.{down}.weight",), f"{ours}.linear_fc2.weight", 1, f"{engine}.w2_weight", 1, expert=True),
        ]
    return entries
