"""Quantised checkpoints: the check whether one can be loaded, and advice on those that cannot."""

from pathlib import Path

from grpo_megatron.errors import UserError, shortened
from grpo_megatron.files import read_object
from grpo_megatron.model.config_json import Fields
from grpo_megatron.paths import is_absent

_MODELOPT = "hf_quant_config.json"  # NVIDIA ModelOpt describes its checkpoints in this file


def fp8_block(folder: Path, config: Fields) -> tuple[int, int] | None:
    """Return the block size of an FP8 checkpoint: the (rows, columns) of a weight that share a scale.

    Return None if the checkpoint is not quantised. Raises UserError if the checkpoint is quantised in another
    way than FP8 with one scale per block, because this project cannot load it. The message names the
    quantisation method and says what to do. Raises UserError also if the block size is not two positive
    integers.

    folder: the folder of the checkpoint.
    config: the contents of the checkpoint's config.json.
    """
    settings = config.object("quantization_config") or config.object("compression_config")
    if settings is None:
        if not is_absent(folder / _MODELOPT):
            quantised = Fields(read_object(folder / _MODELOPT)).object("quantization") or Fields({})
            raise _refusal(_method("modelopt", quantised))
        return None
    method = settings.text("quant_method", None)
    if method is None and (settings.flag("load_in_4bit", False) or settings.flag("load_in_8bit", False)):
        method = "bitsandbytes"
    block = settings.integers("weight_block_size")
    if method in ("fp8", None) and block:
        if len(block) != 2 or min(block) < 1:
            raise UserError(
                f"quantization_config.weight_block_size must be two positive integers, but is {block}"
            )
        return block[0], block[1]
    raise _refusal(_method(method or "an unnamed method", settings))


def quantisation_method(config: Fields) -> str | None:
    """Return the quantisation method that a config.json names, or None. config: its contents."""
    settings = config.object("quantization_config")
    return settings.text("quant_method", None) if settings else None


def _method(name: str, settings: Fields) -> str:
    """Return the name of a quantisation method, and its variant if known, such as "modelopt (NVFP4)".

    name: `quant_method` of config.json, such as "modelopt".
    settings: the checkpoint's description of its quantisation, such as `quantization_config` of config.json.
        This description may name the variant.
    """
    variant = settings.text("quant_algo", None) or settings.text("format", None)
    return shortened(name) + (f" ({shortened(variant)})" if variant else "")


def _refusal(method: str) -> UserError:
    way = "use the original checkpoint in bf16 or fp16, which the model card names as base_model"
    if method.startswith("bitsandbytes"):
        way += (
            ", or dequantise it once with transformers where bitsandbytes is installed: "
            "AutoModelForCausalLM.from_pretrained(FOLDER).dequantize().save_pretrained(OUT)"
        )
    return UserError(
        f"the weights are quantised with {method} and cannot be trained; {way}. The only quantised "
        "checkpoints that can be loaded are FP8 with block scales (quant_method fp8 with weight_block_size, "
        "as in DeepSeek-V3) and gpt-oss in MXFP4"
    )
