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
        "where the scales come from: tensorwise (the tensor at hand), delayed (its last largest values), "
        "blockwise (blocks of 128, weights of 128 x 128), mxfp8 (blocks of 32; Blackwell)",
    )
    format: FP8Format = option(
        FP8Format.hybrid, "hybrid (gradients in E5M2, all else in E4M3) or e4m3 (all in E4M3)"
    )
    bf16_first_layers: int = option(
        0, "the model's first layers that stay in bf16; not with delayed", "layers", ge=0
    )
    bf16_last_layers: int = option(
        0, "the model's last layers that stay in bf16; not with delayed", "layers", ge=0
    )
