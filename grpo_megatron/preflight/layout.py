"""Rules about the trainer's parallel layout: its sizes by themselves, and together with the model's sizes."""

from collections.abc import Iterator

from grpo_megatron.model.architecture import Architecture
from grpo_megatron.model.parallel_sizes import ParallelSizes
from grpo_megatron.preflight.rule import RuleBook

# Each check takes ParallelSizes.
SIZES = RuleBook()
# Each check takes ParallelSizes and the model's Architecture.
SIZES_OF_MODEL = RuleBook()

_TP, _PP, _VPP = "megatron.tensor_parallel", "megatron.pipeline_parallel", "megatron.virtual_pipeline"
_EP, _ETP = "megatron.expert_parallel", "megatron.expert_tensor_parallel"
_SP, _LAYERS = "megatron.sequence_parallel", "megatron.pipeline_layers"


def layout_violations(sizes: ParallelSizes, out_of_limits: frozenset[str] = frozenset()) -> list[str]:
    """Return one sentence for each rule that the parallel sizes break, whatever the model.

    out_of_limits: keys whose values are outside the limits of their own key. Rules about them are skipped.
    """
    return SIZES.violations(sizes, out_of_limits=out_of_limits)


def layout_violations_of_model(
    sizes: ParallelSizes, arch: Architecture, out_of_limits: frozenset[str] = frozenset()
) -> list[str]:
    """Return one sentence for each rule about parallel sizes and model together that is broken.

    `layout_violations` checks the rules about the sizes by themselves.

    out_of_limits: keys whose values are outside the limits of their own key. Rules about them are skipped.
    """
    return SIZES_OF_MODEL.violations(sizes, arch, out_of_limits=out_of_limits)


@SIZES.rule(
    "Sequence parallelism splits activations over the tensor-parallel ranks, so there must be several.",
    _SP,
    _TP,
)
def sequence_parallel_has_ranks(sizes: ParallelSizes) -> Iterator[str]:
    if sizes.sequence_parallel and sizes.tp == 1:
        yield "megatron.sequence_parallel=true needs megatron.tensor_parallel > 1"


@SIZES.rule(
    "Several model chunks per stage interleave a pipeline, so there must be several stages.", _VPP, _PP
)
def virtual_pipeline_has_stages(sizes: ParallelSizes) -> Iterator[str]:
    if sizes.vpp > 1 and sizes.pp == 1:
        yield f"megatron.virtual_pipeline={sizes.vpp} needs megatron.pipeline_parallel > 1"


@SIZES.rule(
    "An uneven split names the layers of every model chunk, of which there are stages times chunks.",
    _LAYERS,
    _PP,
    _VPP,
)
def pipeline_layers_are_complete(sizes: ParallelSizes) -> Iterator[str]:
    if sizes.pipeline_layers and len(sizes.pipeline_layers) != sizes.num_chunks:
        yield (
            f"megatron.pipeline_layers={list(sizes.pipeline_layers)} must be {sizes.num_chunks} numbers: the "
            "layers of each of pipeline_parallel * virtual_pipeline model chunks, in forward order"
        )


@SIZES.rule(
    "Experts are laid over the ranks of a pipeline stage, so expert parallel times expert-tensor parallel "
    "must divide those.",
    _EP,
    _ETP,
    _TP,
    "megatron.context_parallel",
    "megatron.data_parallel",
)
def experts_divide_a_stage(sizes: ParallelSizes) -> Iterator[str]:
    stage = sizes.tp * sizes.cp * sizes.dp
    if stage % (sizes.ep * sizes.etp):
        yield (
            f"megatron.expert_parallel * expert_tensor_parallel = {sizes.ep * sizes.etp} does not divide the "
            f"{stage} ranks of a pipeline stage (tensor_parallel * context_parallel * data_parallel)"
        )


@SIZES_OF_MODEL.rule("Each tensor-parallel rank holds whole attention heads, equally many.", _TP)
def heads_divide(sizes: ParallelSizes, arch: Architecture) -> Iterator[str]:
    if arch.num_heads % sizes.tp:
        yield (
            f"megatron.tensor_parallel={sizes.tp} does not divide the model's {arch.num_heads} attention "
            "heads"
        )


@SIZES_OF_MODEL.rule(
    "KV heads are divided over the tensor-parallel ranks, or each is on equally many of them.", _TP
)
def kv_heads_divide(sizes: ParallelSizes, arch: Architecture) -> Iterator[str]:
    if arch.num_kv_heads % sizes.tp and sizes.tp % arch.num_kv_heads:
        yield (
            f"megatron.tensor_parallel={sizes.tp} and the model's {arch.num_kv_heads} KV heads: one must "
            "divide the other"
        )


@SIZES_OF_MODEL.rule(
    "The rows of Q, K and V together are divided evenly over the tensor-parallel ranks.", _TP
)
def qkv_rows_divide(sizes: ParallelSizes, arch: Architecture) -> Iterator[str]:
    rows = (arch.num_heads + 2 * arch.num_kv_heads) * arch.head_dim
    if rows % sizes.tp:
        yield f"megatron.tensor_parallel={sizes.tp} does not divide the model's {rows} rows of Q, K and V"


@SIZES_OF_MODEL.rule("The model's intermediate size is divided evenly over the tensor-parallel ranks.", _TP)
def intermediate_size_divides(sizes: ParallelSizes, arch: Architecture) -> Iterator[str]:
    if arch.ffn_hidden_size % sizes.tp:
        yield (
            f"megatron.tensor_parallel={sizes.tp} does not divide the model's intermediate size "
            f"{arch.ffn_hidden_size}"
        )
    if arch.moe is not None and arch.moe.shared_ffn_hidden_size % sizes.tp:
        yield (
            f"megatron.tensor_parallel={sizes.tp} does not divide the shared experts' intermediate size "
            f"{arch.moe.shared_ffn_hidden_size}"
        )


@SIZES_OF_MODEL.rule(
    "With sequence parallelism, the hidden size is divided evenly over the tensor-parallel ranks.", _TP, _SP
)
def hidden_size_divides(sizes: ParallelSizes, arch: Architecture) -> Iterator[str]:
    if sizes.sequence_parallel and arch.hidden_size % sizes.tp:
        yield (
            f"megatron.tensor_parallel={sizes.tp} does not divide the model's hidden size {arch.hidden_size}"
        )


@SIZES_OF_MODEL.rule(
    "The model chunks together hold all layers: equally many, or as listed.", _LAYERS, _PP, _VPP
)
def chunks_hold_all_layers(sizes: ParallelSizes, arch: Architecture) -> Iterator[str]:
    if sizes.pipeline_layers:
        if sum(sizes.pipeline_layers) != arch.num_layers:
            yield (
                f"megatron.pipeline_layers={list(sizes.pipeline_layers)} are {sum(sizes.pipeline_layers)} "
                f"layers, the model has {arch.num_layers}"
            )
    elif arch.num_layers % sizes.num_chunks:
        chunks = f"megatron.pipeline_parallel={sizes.pp}"
        if sizes.vpp > 1:
            chunks += f" times megatron.virtual_pipeline={sizes.vpp}"
        yield (
            f"{chunks} does not divide the model's {arch.num_layers} layers; megatron.pipeline_layers can "
            "name an uneven split"
        )


@SIZES_OF_MODEL.rule(
    "Expert parallelism, and expert-tensor parallelism, are for models with experts.", _EP, _ETP
)
def there_are_experts(sizes: ParallelSizes, arch: Architecture) -> Iterator[str]:
    if arch.moe is None:
        for key, ranks in ((_EP, sizes.ep), (_ETP, sizes.etp)):
            if ranks > 1:
                yield f"{key}={ranks} needs a model with experts, this one is dense"


@SIZES_OF_MODEL.rule("Each expert-parallel rank holds equally many experts.", _EP)
def expert_parallel_divides(sizes: ParallelSizes, arch: Architecture) -> Iterator[str]:
    if arch.moe is not None and arch.moe.num_experts % sizes.ep:
        yield (
            f"megatron.expert_parallel={sizes.ep} does not divide the model's {arch.moe.num_experts} experts"
        )


@SIZES_OF_MODEL.rule(
    "The experts' intermediate size is divided evenly over the expert-tensor-parallel ranks.", _ETP
)
def experts_size_divides(sizes: ParallelSizes, arch: Architecture) -> Iterator[str]:
    if arch.moe is not None and arch.moe.ffn_hidden_size % sizes.etp:
        yield (
            f"megatron.expert_tensor_parallel={sizes.etp} does not divide the experts' intermediate size "
            f"{arch.moe.ffn_hidden_size}"
        )


@SIZES_OF_MODEL.rule(
    "A model with experts needs sequence parallelism wherever it has tensor parallelism.", _TP, _SP
)
def experts_with_tp_need_sp(sizes: ParallelSizes, arch: Architecture) -> Iterator[str]:
    if arch.moe is not None and sizes.tp > 1 and not sizes.sequence_parallel:
        yield "a model with experts and megatron.tensor_parallel > 1 needs megatron.sequence_parallel=true"
