"""LoRA adapters in PEFT's format: a folder with adapter_model.safetensors and adapter_config.json."""

from collections.abc import Iterable
from pathlib import Path

from safetensors.torch import load_file

from grpo_megatron.config.lora import LoraConfig, peft_config
from grpo_megatron.files import json_text
from grpo_megatron.weights.safetensors_file import save

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def finish(folder: str, parts: Iterable[str], lora: LoraConfig, base: str) -> None:
    """Complete an export of LoRA adapters: merge the shards into PEFT's weight file, and write PEFT's config.

    The files are adapter_model.safetensors and adapter_config.json.

    folder: the folder of the export, which already contains the shards (safetensors files with the adapters).
    parts: file names of the shards. The shards are deleted.
    lora: settings with which the adapters were trained.
    base: name or path of the model that the adapters belong to.
    """
    root = Path(folder)
    files = [root / name for name in parts]
    tensors = {name: tensor for path in files for name, tensor in load_file(path).items()}
    save(root / WEIGHTS, tensors)
    for path in files:
        path.unlink()
    (root / CONFIG).write_text(json_text(peft_config(lora, base), indent=2), encoding="utf-8")
