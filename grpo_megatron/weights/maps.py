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

    hf: the HF tensors it is made of. shapes: of each of them. megatron: its name with global layer numbers. axis: the axis
    split over TP, None if every rank has all of it. engine, engine_axis: the same in the engine; of an
    expert, its slice of the engine's stacked tensor. exported is False for a second copy (the tied
    embedding on the last pipeline stage). expert: one expert's parameter, which only the ranks that
    hold this expert have, split over expert-tensor parallel ranks instead.
    """

    hf: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
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


def hf_shapes(entries: dict[str, Entry]) -> dict[str, tuple[int, ...]]:
    """{HF tensor: its full shape} of all that a weight map reads."""
    return {name: shape for entry in entries.values() for name, shape in zip(entry.hf, entry.shapes, strict=True)}


def _model(arch: Architecture, vocab: PadVocab) -> list[Entry]:
    embedding, table = "model.embed_tokens.weight", ((arch.vocab_size, arch.hidden_size),)
    entries = [Entry((embedding,), table, "embedding.word_embeddings.weight", 0, embedding, 0, vocab)]
    for layer in range(arch.num_layers):
        hf, megatron = f"model.layers.{layer}", f"decoder.layers.{layer}"
        entries += _attention(arch, hf, megatron)
        has_experts = arch.moe is not None and arch.moe.layers[layer]
        entries += _experts(arch, hf, megatron) if has_experts else _dense_mlp(arch, hf, megatron)
    entries.append(_same("model.norm.weight", (arch.hidden_size,), "decoder.final_layernorm.weight", None))
    if arch.tied_embeddings:
        entries.append(Entry((embedding,), table, "output_layer.weight", 0, embedding, 0, vocab, exported=False))
    else:
        entries.append(Entry(("lm_head.weight",), table, "output_layer.weight", 0, "lm_head.weight", 0, vocab))
    return entries


def _same(hf: str, shape: tuple[int, ...], megatron: str, axis: int | None) -> Entry:
    return Entry((hf,), (shape,), megatron, axis, hf, axis)


def _attention(arch: Architecture, hf: str, megatron: str) -> list[Entry]:
    """Both norms of a layer and what is between them."""
    hidden, head = arch.hidden_size, arch.head_dim
    rows = {"q": arch.num_heads * head, "k": arch.num_kv_heads * head, "v": arch.num_kv_heads * head}

    def same(hf_name: str, shape: tuple[int, ...], megatron_name: str, axis: int | None) -> Entry:
        return _same(f"{hf}.{hf_name}", shape, f"{megatron}.{megatron_name}", axis)

    def qkv(kind: str, columns: tuple[int, ...]) -> Entry:
        parts = tuple(f"{hf}.self_attn.{name}_proj.{kind}" for name in rows)
        shapes = tuple((count, *columns) for count in rows.values())
        fuse = FuseQKV(arch.num_heads, arch.num_kv_heads, head)
        return Entry(
            parts, shapes, f"{megatron}.self_attention.linear_qkv.{kind}", 0, f"{hf}.self_attn.qkv_proj.{kind}", 0, fuse
        )

    entries = [same("input_layernorm.weight", (hidden,), "input_layernorm.weight", None), qkv("weight", (hidden,))]
    if arch.qkv_bias:
        entries.append(qkv("bias", ()))
    if arch.qk_norm:
        entries.append(same("self_attn.q_norm.weight", (head,), "self_attention.q_layernorm.weight", None))
        entries.append(same("self_attn.k_norm.weight", (head,), "self_attention.k_layernorm.weight", None))
    return [
        *entries,
        same("self_attn.o_proj.weight", (hidden, rows["q"]), "self_attention.linear_proj.weight", 1),
        same("post_attention_layernorm.weight", (hidden,), "pre_mlp_layernorm.weight", None),
    ]


def _dense_mlp(arch: Architecture, hf: str, megatron: str) -> list[Entry]:
    hidden, ffn = arch.hidden_size, arch.ffn_hidden_size
    gate_up = tuple(f"{hf}.mlp.{name}_proj.weight" for name in ("gate", "up"))
    shapes = ((ffn, hidden),) * 2
    return [
        Entry(gate_up, shapes, f"{megatron}.mlp.linear_fc1.weight", 0, f"{hf}.mlp.gate_up_proj.weight", 0, FuseGateUp()),
        _same(f"{hf}.mlp.down_proj.weight", (hidden, ffn), f"{megatron}.mlp.linear_fc2.weight", 1),
    ]


# family -> (the block's name, gate, up and down projection of an expert)
_EXPERT_NAMES = {
    "qwen3_moe": ("mlp", "gate_proj", "up_proj", "down_proj"),
    "mixtral": ("block_sparse_moe", "w1", "w3", "w2"),
}


def _experts(arch: Architecture, hf: str, megatron: str) -> list[Entry]:
    block, gate, up, down = _EXPERT_NAMES[arch.family]
    hidden, ffn, count = arch.hidden_size, arch.moe.ffn_hidden_size, arch.moe.num_experts
    entries = [_same(f"{hf}.{block}.gate.weight", (count, hidden), f"{megatron}.mlp.router.weight", None)]
    engine, shapes = f"{hf}.{block}.experts", ((ffn, hidden),) * 2
    for number in range(count):
        theirs, ours = f"{hf}.{block}.experts.{number}", f"{megatron}.mlp.experts.local_experts.{number}"
        gate_up, downs = (f"{theirs}.{gate}.weight", f"{theirs}.{up}.weight"), (f"{theirs}.{down}.weight",)
        entries += [
            Entry(gate_up, shapes, f"{ours}.linear_fc1.weight", 0, f"{engine}.w13_weight", 0, FuseGateUp(), expert=True),
            Entry(downs, ((hidden, ffn),), f"{ours}.linear_fc2.weight", 1, f"{engine}.w2_weight", 1, expert=True),
        ]
    return entries
