"""Tiny random HF checkpoints of language models with a vision model."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tests.models import HYBRIDS, tiny_model

VISION = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "patch_size": 4,
    "out_hidden_size": 64,
    "num_position_embeddings": 16,
}


def vision_model(folder, family, **changes) -> str:
    """Write a tiny_model of Qwen3.5 with a vision model, in the layout of the published checkpoints.

    All experts of a layer are in two tensors there. transformers reads this layout, but does not write it.
    """
    import transformers

    tiny_model(folder, family, **changes)
    weights, settings = Path(folder, "model.safetensors"), Path(folder, "config.json")
    text, name = json.loads(settings.read_text()), HYBRIDS[family][0]
    config = getattr(transformers, f"{name}Config")(
        text_config=text,
        vision_config=VISION,
        tie_word_embeddings=text["tie_word_embeddings"],
        architectures=[f"{name}ForConditionalGeneration"],
    )
    visual = getattr(transformers, f"{name}ForConditionalGeneration")(config).model.visual
    stored = {f"model.visual.{key}": value for key, value in visual.state_dict().items()}
    stored["mtp.fc.weight"] = torch.ones(2, 2)
    for key, value in _stacked(load_file(weights)).items():
        stored[key.replace("model.", "model.language_model.", 1)] = value
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
