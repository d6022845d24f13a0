"""Check that the trainer can compute a model in FP8, given its config.json and the parallel layout."""

from collections.abc import Iterator

from grpo_megatron.config.fp8 import FP8Recipe
from grpo_megatron.config.schema import Config, Precision
from grpo_megatron.model.architecture import Architecture
from grpo_megatron.model.families import weight_map
from grpo_megatron.model.parallel_sizes import ParallelSizes


def fp8_violations(config: Config, arch: Architecture) -> list[str]:
    """Return one sentence for each reason why the trainer cannot compute the model in FP8.

    There are two kinds of reasons. Either a side of a layer's matrix on a rank is not divisible by 16, 32 or
    128 (which of these the FP8 recipe needs), or megatron.fp8.bf16_first_layers or bf16_last_layers exceeds
    the number of layers of a pipeline stage. The list is empty unless megatron.precision is fp8.
    """
    megatron = config.megatron
    if megatron.precision != Precision.fp8:
        return []
    sizes = ParallelSizes.from_config(megatron)
    return [*_matrices(arch, sizes, megatron.fp8.recipe), *_layers_in_bf16(config, arch, sizes)]


def _matrices(arch: Architecture, sizes: ParallelSizes, recipe: FP8Recipe) -> Iterator[str]:
    multiple = 32 if recipe == FP8Recipe.mxfp8 else 16
    # A rank casts its part of an activation before the parts are gathered, so each part must consist of whole
    # blocks of 128.
    of_gathered = 128 if recipe == FP8Recipe.blockwise and sizes.sequence_parallel else multiple
    kinds = {}
    for name, entry in weight_map(arch).items():
        if ".linear_" not in name or entry.axis is None or len(entry.shapes[0]) != 2:
            continue  # only linear layers that Megatron splits over ranks are computed in FP8
        parts = sizes.etp if entry.expert else sizes.tp
        # The side that is not divided belongs to the activations whose values or gradients the ranks gather.
        sides = enumerate(entry.megatron_shape(parts))
        wrong = [
            size
            for axis, size in sides
            if size % (multiple if axis == entry.axis or entry.expert else of_gathered)
        ]
        if wrong:
            kinds.setdefault(kind(name), wrong[0])
    layout = f"megatron.tensor_parallel={sizes.tp}" + (
        f", expert_tensor_parallel={sizes.etp}" if arch.moe else ""
    )
    for name, size in kinds.items():
        needed = multiple if size % multiple else of_gathered
        yield (
            f"megatron.precision=fp8 with megatron.fp8.recipe={recipe.value}: a side of {name} is {size} on "
            f"each rank ({layout}), which is not a multiple of {needed}; use fewer ranks, a different "
            "recipe, or megatron.precision=bf16"
        )


def kind(name: str) -> str:
    """Return the kind of layer that a parameter belongs to, such as `mlp.linear_fc1`.

    All layers of a kind have the same sizes, so one error message about a kind is enough.

    name: Megatron's name of the parameter, such as `decoder.layers.3.mlp.linear_fc1.weight`.
    """
    return ".".join(
        part
        for part in name.removeprefix("decoder.layers.").removesuffix(".weight").split(".")
        if not part.isdigit()
    )


def _layers_in_bf16(config: Config, arch: Architecture, sizes: ParallelSizes) -> Iterator[str]:
    stage = arch.num_layers // sizes.pp
    for key in ("bf16_first_layers", "bf16_last_layers"):
        count = getattr(config.megatron.fp8, key)
        if count > stage:
            yield (
                f"megatron.fp8.{key}={count}, but a pipeline stage has only {stage} of the model's "
                f"{arch.num_layers} layers; lower megatron.fp8.{key}"
            )
