"""Tiny random HF checkpoints of language models with a vision model."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tests.models import ALL_FAMILIES, tiny_model

_QWEN = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "patch_size": 4,
    "out_hidden_size": 64,
    "num_position_embeddings": 16,
}
_GEMMA = {
    "num_hidden_layers": 1,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 2,
    "patch_size": 4,
    "image_size": 16,
}


def vision_model(folder, family, **changes) -> str:
    """Write a tiny_model of Qwen3.5 or Gemma 3 with a vision model, in the published checkpoints' layout.

    In Qwen3.5's, all experts of a layer are in two tensors. transformers reads this layout, but does not
    write it.
    """
    import transformers

    is_gemma = family == "gemma3"
    tiny_model(folder, family, **({"tied": True} | changes if is_gemma else changes))
    weights, settings = Path(folder, "model.safetensors"), Path(folder, "config.json")
    texts, text, name = load_file(weights), json.loads(settings.read_text()), ALL_FAMILIES[family][0]
    config = getattr(transformers, f"{name}Config")(
        text_config=text,
        vision_config=_GEMMA if is_gemma else _QWEN,
        tie_word_embeddings=text["tie_word_embeddings"],
        architectures=[f"{name}ForConditionalGeneration"],
        **({"mm_tokens_per_image": 4} if is_gemma else {}),
    )
    model = getattr(transformers, f"{name}ForConditionalGeneration")(config)
    if is_gemma:
        model.save_pretrained(folder)
        found, prefix = load_file(weights), "language_model.model."
        stored = {key: value for key, value in found.items() if not key.startswith(prefix)}
    else:
        prefix = "model.language_model."
        stored = {f"model.visual.{key}": value for key, value in model.model.visual.state_dict().items()}
        stored["mtp.fc.weight"] = torch.ones(2, 2)
    for key, value in _stacked(texts).items():
        stored[key.replace("model.", prefix, 1)] = value
    save_file(stored, weights, metadata={"format": "pt"})
    settings.write_text(json.dumps(config.to_dict()))
    return str(folder)


def _stacked(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors of a language model, with all experts of a layer in two tensors."""
    found = {name: tensor for name, tensor in tensors.items() if ".mlp.experts." not in name}
    for block in {name.split(".experts.")[0] for name in tensors.keys() - found.keys()}:
        count = len([name for name in tensors if name.startswith(f"{block}.experts.")]) // 3

        def of(expert: int, projection: str, block: str = block) -> torch.Tensor:
            return tensors[f"{block}.experts.{expert}.{projection}_proj.weight"]

        found[f"{block}.experts.gate_up_proj"] = torch.stack(
            [torch.cat([of(expert, "gate"), of(expert, "up")]) for expert in range(count)]
        )
        found[f"{block}.experts.down_proj"] = torch.stack([of(expert, "down") for expert in range(count)])
    return found
