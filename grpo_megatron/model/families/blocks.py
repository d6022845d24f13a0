"""Weight map entries of the layers that most families share."""

from collections.abc import Callable
from dataclasses import replace

from grpo_megatron.model.architecture import Architecture
from grpo_megatron.model.arrangement import QKV, GatedQKV, GateUp, OfHeads, Vocab
from grpo_megatron.model.entries import Entry, Expert
from grpo_megatron.model.pieces import Shape

# Megatron's name of the one-row head that a reward model has in place of the output projection.
SCALAR_HEAD = "output_layer.weight"

# (architecture, HF's name of a layer, Megatron's name of it) -> entries of the layer's attention or MLP
Block = Callable[[Architecture, str, str], list[Entry]]


def same(hf: str, shape: Shape, megatron: str, axis: int | None) -> Entry:
    """Return the weight map entry of a parameter that is one tensor in HF, in Megatron and in the engine.

    The entry says how the parameter is named in each of the three, and how it is sharded.

    hf: name of the tensor in HF and in the engine.
    shape: full shape of the tensor.
    megatron: name of the parameter in Megatron.
    axis: axis that is split over tensor-parallel ranks in Megatron and in the engine; None: not split.
    """
    return Entry((hf,), (shape,), megatron, axis, hf, axis)


def decoder(
    arch: Architecture,
    attention: Block,
    mlp: Block,
    experts: Block | None = None,
    delta: Block | None = None,
) -> list[Entry]:
    """Return the weight map entries of a whole decoder, in the order of the forward pass.

    An entry says how a parameter is named and sharded in HF, Megatron and the engine.

    attention, mlp: functions (architecture, HF's name of a layer, Megatron's name of it) that return the
        entries of the layer's attention and MLP.
    experts: function like `mlp` that is used in its place in the layers that have experts. None: there are
        none.
    delta: function like `attention` that is used in its place in the layers that are gated delta networks.
        None: there are none.
    """
    embedding, table = "model.embed_tokens.weight", ((arch.vocab_size, arch.hidden_size),)
    # attention=True: an attention group of the engine also looks up the embeddings of its own tokens.
    words = Entry(
        (embedding,), table, "embedding.word_embeddings.weight", 0, embedding, 0, Vocab(), attention=True
    )
    entries = [words]
    for layer in range(arch.num_layers):
        hf, megatron = f"model.layers.{layer}", f"decoder.layers.{layer}"
        has_experts = arch.moe is not None and arch.moe.layers[layer]
        is_delta = arch.delta is not None and arch.delta.layers[layer]
        mixer = (delta if is_delta else attention)(arch, hf, megatron)
        entries += [replace(entry, attention=True) for entry in mixer]
        entries += (experts if has_experts else mlp)(arch, hf, megatron)
    entries.append(same("model.norm.weight", (arch.hidden_size,), "decoder.final_layernorm.weight", None))
    if arch.scalar_head:
        entries.append(same("score.weight", (1, arch.hidden_size), SCALAR_HEAD, None))
    elif arch.tied_embeddings:
        entries.append(
            Entry((embedding,), table, "output_layer.weight", 0, embedding, 0, Vocab(), exported=False)
        )
    else:
        entries.append(
            Entry(("lm_head.weight",), table, "output_layer.weight", 0, "lm_head.weight", 0, Vocab())
        )
    return entries


def layer_norms(arch: Architecture, hf: str, megatron: str) -> tuple[Entry, Entry]:
    """Return the weight map entries of a layer's norms: the norm before attention, the norm before the MLP.

    hf, megatron: name of the layer in HF and in Megatron.
    """
    # In Gemma 3, post_attention_layernorm is the norm of the attention's output, so the norm before the MLP
    # has another name.
    of_mlp = "pre_feedforward_layernorm" if arch.output_norms else "post_attention_layernorm"
    names = ("input_layernorm", "input_layernorm"), (of_mlp, "pre_mlp_layernorm")
    before, after = (
        same(f"{hf}.{theirs}.weight", (arch.hidden_size,), f"{megatron}.{ours}.weight", None)
        for theirs, ours in names
    )
    return before, after


def attention(arch: Architecture, hf: str, megatron: str) -> list[Entry]:
    """Return the weight map entries of one layer's grouped-query attention, and of the layer's two norms.

    An entry says how a parameter is named and sharded in HF, Megatron and the engine. Norms of queries and
    keys, biases, sinks and the output gate are included if the architecture has them.

    hf, megatron: name of the layer in HF and in Megatron.
    """
    hidden, head = arch.hidden_size, arch.head_dim
    queries, keys = arch.num_heads * head, arch.num_kv_heads * head
    rows = {"q": queries * (2 if arch.output_gate else 1), "k": keys, "v": keys}
    fused = (GatedQKV if arch.output_gate else QKV)(arch.num_heads, arch.num_kv_heads, head)

    def of_layer(hf_name: str, shape: Shape, megatron_name: str, axis: int | None) -> Entry:
        return same(f"{hf}.{hf_name}", shape, f"{megatron}.{megatron_name}", axis)

    def qkv(kind: str, columns: Shape) -> Entry:
        parts = tuple(f"{hf}.self_attn.{name}_proj.{kind}" for name in rows)
        shapes = tuple((count, *columns) for count in rows.values())
        names = f"{megatron}.self_attention.linear_qkv.{kind}", f"{hf}.self_attn.qkv_proj.{kind}"
        return Entry(parts, shapes, names[0], 0, names[1], 0, fused)

    before, after = layer_norms(arch, hf, megatron)
    entries = [before, qkv("weight", (hidden,))]
    if arch.qkv_bias:
        entries.append(qkv("bias", ()))
    heads = {"q": arch.num_heads, "k": arch.num_kv_heads} if arch.qk_norm else {}
    for name, count in heads.items():
        hf_name, megatron_name = f"self_attn.{name}_norm.weight", f"self_attention.{name}_layernorm.weight"
        norm = of_layer(hf_name, (head,), megatron_name, None)
        if arch.joint_qk_norm:
            norm = replace(of_layer(hf_name, (rows[name],), megatron_name, 0), kind=OfHeads(count))
        entries.append(norm)
    if arch.sinks:
        sinks = "self_attn.sinks", (arch.num_heads,), "self_attention.core_attention.softmax_offset", 0
        entries.append(of_layer(*sinks))
    projection = "self_attn.o_proj", "self_attention.linear_proj"
    entries.append(of_layer(f"{projection[0]}.weight", (hidden, queries), f"{projection[1]}.weight", 1))
    if arch.linear_bias:
        entries.append(of_layer(f"{projection[0]}.bias", (hidden,), f"{projection[1]}.bias", None))
    if arch.output_norms:
        norm = "post_attention_layernorm.weight", (hidden,), f"{projection[1]}.norm.weight", None
        entries.append(of_layer(*norm))
    return [*entries, after]


def mlp(arch: Architecture, hf: str, megatron: str) -> list[Entry]:
    """Return the weight map entries of one layer's SwiGLU MLP.

    An entry says how a parameter is named and sharded in HF, Megatron and the engine.

    hf, megatron: name of the layer in HF and in Megatron.
    """
    entries = [*_swiglu(arch.hidden_size, arch.ffn_hidden_size, f"{hf}.mlp", f"{megatron}.mlp")]
    if arch.output_norms:
        names = f"{hf}.post_feedforward_layernorm.weight", f"{megatron}.mlp.linear_fc2.norm.weight"
        entries.append(same(names[0], (arch.hidden_size,), names[1], None))
    return entries


def _swiglu(
    hidden: int,
    ffn: int,
    hf: str,
    megatron: str,
    gate: str = "gate_proj",
    up: str = "up_proj",
    down: str = "down_proj",
) -> tuple[Entry, Entry]:
    """Return the weight map entries of a SwiGLU MLP: one for gate and up together, one for down.

    hidden: channels of the hidden states.
    ffn: intermediate size of the MLP.
    hf, megatron: name of the MLP in HF and in Megatron.
    gate, up, down: HF's names of the three projections.
    """
    gate_up, shapes = (f"{hf}.{gate}.weight", f"{hf}.{up}.weight"), ((ffn, hidden),) * 2
    return (
        Entry(gate_up, shapes, f"{megatron}.linear_fc1.weight", 0, f"{hf}.gate_up_proj.weight", 0, GateUp()),
        same(f"{hf}.{down}.weight", (hidden, ffn), f"{megatron}.linear_fc2.weight", 1),
    )


def experts(
    block: str,
    gate: str,
    up: str,
    down: str,
    bias: str = "gate.e_score_correction_bias",
    shared: str = "shared_experts",
) -> Block:
    """Return a function that makes the weight map entries of a layer's router and experts.

    The function takes an architecture, HF's name of the layer and Megatron's name of it. An entry says how a
    parameter is named and sharded in HF, Megatron and the engine. The experts are SwiGLU MLPs. Shared experts
    are included if the architecture has them.

    block: HF's name of the module with the experts, within the layer.
    gate, up, down: HF's names of the three projections of an expert.
    bias: HF's name of the router's correction bias, within the module.
    shared: HF's name of the shared experts, within the block. Their gate has the same name with `_gate`.
    """

    def entries(arch: Architecture, hf: str, megatron: str) -> list[Entry]:
        hidden, ffn, count = arch.hidden_size, arch.moe.ffn_hidden_size, arch.moe.num_experts
        found = [same(f"{hf}.{block}.gate.weight", (count, hidden), f"{megatron}.mlp.router.weight", None)]
        if arch.moe.correction_bias:
            correction = same(f"{hf}.{block}.{bias}", (count,), f"{megatron}.mlp.router.expert_bias", None)
            found.append(replace(correction, float32=True))
        if arch.moe.shared_ffn_hidden_size:
            names = f"{hf}.{block}.{shared}", f"{megatron}.mlp.shared_experts"
            found += _swiglu(hidden, arch.moe.shared_ffn_hidden_size, *names)
            if arch.moe.shared_gate:
                found.append(same(f"{names[0]}_gate.weight", (1, hidden), f"{names[1]}.gate_weight", None))
        for index in range(count):
            expert = Expert(index, count)
            names = f"{hf}.{block}.experts.{index}", f"{megatron}.mlp.experts.local_experts.{index}"
            fc1, fc2 = _swiglu(hidden, ffn, *names, gate, up, down)
            # The engine has one tensor for the projections of all experts.
            found += [
                replace(fc1, engine=f"{hf}.{block}.experts.w13_weight", expert=expert),
                replace(fc2, engine=f"{hf}.{block}.experts.w2_weight", expert=expert),
            ]
        return found

    return entries
