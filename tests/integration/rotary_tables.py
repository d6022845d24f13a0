"""Program that writes the tables with which SGLang rotates queries and keys, for models in several folders.

Arguments: the output file, then the folders. Run with SGLANG_PLATFORM=grpo_cpu.
"""

import sys

import torch
from sglang.srt.layers.rotary_embedding.factory import get_rope, get_rope_wrapper
from sglang.srt.utils.hf_transformers.common import get_rope_config
from transformers import AutoConfig


def table(folder: str) -> torch.Tensor:
    """Return [positions, rotated channels]: the cosines of each position, then the sines.

    SGLang's models call get_rope with these arguments.
    """
    config = AutoConfig.from_pretrained(folder)
    theta, scaling = get_rope_config(config)
    sizes = {"max_position": config.max_position_embeddings, "base": theta, "dtype": torch.float32}
    if hasattr(config, "qk_rope_head_dim"):
        rotated = config.qk_rope_head_dim
        options = {"rope_scaling": scaling | {"rope_type": "deepseek_yarn"}, "is_neox_style": False}
        return get_rope_wrapper(rotated, rotary_dim=rotated, device="cpu", **options, **sizes).cos_sin_cache
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rotated = getattr(config, "rotary_dim", None) or int(head * scaling.get("partial_rotary_factor", 1.0))
    return get_rope(head, rotary_dim=rotated, rope_scaling=scaling, **sizes).cos_sin_cache


if __name__ == "__main__":
    torch.save([table(folder) for folder in sys.argv[2:]], sys.argv[1])
