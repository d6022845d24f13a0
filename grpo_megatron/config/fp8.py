"""The section `megatron.fp8` of the configuration: how matrix products are computed in FP8."""

from enum import Enum

from grpo_megatron.config.options import dataclass, option


class FP8Recipe(str, Enum):
    tensorwise = "tensorwise"
    delayed = "delayed"
    blockwise = "blockwise"
    mxfp8 = "mxfp8"


class FP8Format(str, Enum):
    hybrid = "hybrid"
    e4m3 = "e4m3"


@dataclass
class FP8Config:
    recipe: FP8Recipe = option(
        FP8Recipe.tensorwise,
        "How scales are computed. tensorwise: one per tensor, from its largest value. delayed: one per "
        "tensor, from its largest values in earlier steps. blockwise: one per 128 values (weights: 128 x "
        "128). mxfp8: one per 32 values; it needs Blackwell.",
    )
    format: FP8Format = option(
        FP8Format.hybrid, "hybrid: E5M2 for gradients, E4M3 for all else. e4m3: E4M3 for all."
    )
    bf16_first_layers: int = option(
        0, "First layers that stay in bf16. Recipe delayed needs 0.", "layers", ge=0
    )
    bf16_last_layers: int = option(
        0, "Last layers that stay in bf16. Recipe delayed needs 0.", "layers", ge=0
    )
