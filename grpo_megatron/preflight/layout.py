"""Rules about the trainer's parallel sizes, alone and together with the model's sizes."""

import math
from collections.abc import Callable, Iterator

from grpo_megatron.model.architecture import Architecture
from grpo_megatron.model.parallel_sizes import ParallelSizes
from grpo_megatron.preflight.rule import TRAINING_COMMANDS, Rule, RuleBook

_TP, _PP, _VPP = "megatron.tensor_parallel", "megatron.pipeline_parallel", "megatron.virtual_pipeline"
_EP, _ETP = "megatron.expert_parallel", "megatron.expert_tensor_parallel"
_SP, _LAYERS = "megatron.sequence_parallel", "megatron.pipeline_layers"
_CP = "megatron.context_parallel"
# Fields of ParallelSizes for the keys that divide sizes of the model.
_FIELDS = {_TP: "tp", _CP: "cp", _EP: "ep", _ETP: "etp"}


def _divides(key: str, what: str, size: Callable[[Architecture], int], *, with_experts: bool = False) -> Rule:
    """Return the rule that a parallel size, or a product of several, must divide a size of the model evenly.

    key: configuration key of the parallel size, or several joined with ` * `.
    what: name of the model's size for messages, such as `attention heads`.
    size: function that returns the model's size.
    with_experts: if True, the rule applies only to models with experts.
    """

    keys = tuple(key.split(" * "))

    def check(sizes: ParallelSizes, arch: Architecture) -> Iterator[str]:
        parts = math.prod(getattr(sizes, _FIELDS[each]) for each in keys)
        if (arch.moe is not None or not with_experts) and size(arch) % parts:
            yield f"{key}={parts}, {what}: {size(arch)}"

    return Rule(f"{key} must divide the model's {what}.", keys, TRAINING_COMMANDS, check)


def _query_key_value_rows(arch: Architecture) -> int:
    """Return the number of rows of the fused projection of queries, keys, values and output gate."""
    queries = arch.num_heads * (2 if arch.output_gate else 1)
    return (queries + 2 * arch.num_kv_heads) * arch.head_dim


# Each check takes ParallelSizes.
SIZES = RuleBook()
# Each check takes ParallelSizes and the model's Architecture.
SIZES_OF_MODEL = RuleBook(
    _divides(_TP, "attention heads", lambda arch: arch.num_heads),
    _divides(_TP, "rows of Q, K and V", _query_key_value_rows),
    _divides(
        f"{_TP} * {_CP}",
        "key heads of gated delta networks",
        lambda arch: arch.delta.key_heads if arch.delta else 0,
    ),
    _divides(_TP, "intermediate size", lambda arch: arch.ffn_hidden_size),
    _divides(
        _TP,
        "intermediate size of shared experts",
        lambda arch: arch.moe.shared_ffn_hidden_size,
        with_experts=True,
    ),
    _divides(_EP, "experts", lambda arch: arch.moe.num_experts, with_experts=True),
    _divides(_ETP, "intermediate size of experts", lambda arch: arch.moe.ffn_hidden_size, with_experts=True),
)


@SIZES.rule(f"{_SP}=true needs {_TP} > 1: it divides activations among the tensor-parallel ranks.", _SP, _TP)
def sequence_parallel_has_ranks(sizes: ParallelSizes) -> Iterator[str]:
    if sizes.sequence_parallel and sizes.tp == 1:
        yield ""


@SIZES.rule(f"{_VPP} > 1 needs {_PP} > 1: it interleaves the stages of a pipeline.", _VPP, _PP)
def virtual_pipeline_has_stages(sizes: ParallelSizes) -> Iterator[str]:
    if sizes.vpp > 1 and sizes.pp == 1:
        yield f"{_VPP}={sizes.vpp}"


@SIZES.rule(
    f"{_LAYERS} must have one number for each model chunk, in forward order: {_PP} * {_VPP} numbers.",
    _LAYERS,
    _PP,
    _VPP,
)
def pipeline_layers_are_complete(sizes: ParallelSizes) -> Iterator[str]:
    if sizes.pipeline_layers and len(sizes.pipeline_layers) != sizes.num_chunks:
        yield f"{_LAYERS}={list(sizes.pipeline_layers)}, model chunks: {sizes.num_chunks}"


@SIZES.rule(
    f"{_EP} * {_ETP} must divide the ranks of a pipeline stage: {_TP} * megatron.context_parallel * "
    "megatron.data_parallel.",
    _EP,
    _ETP,
    _TP,
    "megatron.context_parallel",
    "megatron.data_parallel",
)
def experts_divide_a_stage(sizes: ParallelSizes) -> Iterator[str]:
    stage = sizes.tp * sizes.cp * sizes.dp
    if stage % (sizes.ep * sizes.etp):
        yield f"{sizes.ep * sizes.etp} does not divide {stage}"


@SIZES_OF_MODEL.rule(f"{_TP} must divide the model's number of KV heads, or be a multiple of it.", _TP)
def kv_heads_divide(sizes: ParallelSizes, arch: Architecture) -> Iterator[str]:
    if arch.num_kv_heads % sizes.tp and sizes.tp % arch.num_kv_heads:
        yield f"{_TP}={sizes.tp}, KV heads: {arch.num_kv_heads}"


@SIZES_OF_MODEL.rule(
    f"{_TP} must divide the number of KV heads of a model whose norms cover all heads of a token.", _TP
)
def joint_norms_divide(sizes: ParallelSizes, arch: Architecture) -> Iterator[str]:
    if arch.joint_qk_norm and arch.num_kv_heads % sizes.tp:
        yield f"{_TP}={sizes.tp}, KV heads: {arch.num_kv_heads}"


@SIZES_OF_MODEL.rule(f"With {_SP}=true, {_TP} must divide the model's hidden size.", _TP, _SP)
def hidden_size_divides(sizes: ParallelSizes, arch: Architecture) -> Iterator[str]:
    if sizes.sequence_parallel and arch.hidden_size % sizes.tp:
        yield f"{_TP}={sizes.tp}, hidden size: {arch.hidden_size}"


@SIZES_OF_MODEL.rule(
    f"The model chunks must hold all layers: {_LAYERS} must add up to the model's number of layers, or, if "
    f"it is not set, {_PP} * {_VPP} must divide this number.",
    _LAYERS,
    _PP,
    _VPP,
)
def chunks_hold_all_layers(sizes: ParallelSizes, arch: Architecture) -> Iterator[str]:
    if sizes.pipeline_layers:
        if sum(sizes.pipeline_layers) != arch.num_layers:
            yield f"{_LAYERS}={list(sizes.pipeline_layers)}, layers: {arch.num_layers}"
    elif arch.num_layers % sizes.num_chunks:
        yield f"model chunks: {sizes.num_chunks}, layers: {arch.num_layers}"


@SIZES_OF_MODEL.rule(f"{_EP} > 1 and {_ETP} > 1 need a model with experts.", _EP, _ETP)
def there_are_experts(sizes: ParallelSizes, arch: Architecture) -> Iterator[str]:
    if arch.moe is None and max(sizes.ep, sizes.etp) > 1:
        yield f"{_EP}={sizes.ep}, {_ETP}={sizes.etp}, but the model is dense"


@SIZES_OF_MODEL.rule(
    f"{_ETP} > 1 is not possible for experts with biases, because Megatron would add them on every rank.",
    _ETP,
)
def experts_with_biases_are_whole(sizes: ParallelSizes, arch: Architecture) -> Iterator[str]:
    if arch.moe is not None and arch.linear_bias and sizes.etp > 1:
        yield f"{_ETP}={sizes.etp}"


@SIZES_OF_MODEL.rule(f"A model with experts and {_TP} > 1 needs {_SP}=true.", _TP, _SP)
def experts_with_tp_need_sp(sizes: ParallelSizes, arch: Architecture) -> Iterator[str]:
    if arch.moe is not None and sizes.tp > 1 and not sizes.sequence_parallel:
        yield f"{_TP}={sizes.tp}"
