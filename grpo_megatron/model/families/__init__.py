"""Model families. Each family reads its models' config.json and maps their tensors.

To add a family, define a Family in a file of this folder and add it to _FAMILIES. If it differs from Llama
only in settings of the common decoder, define it in dense.py. See docs/adding-a-model.md.
"""

from dataclasses import replace
from pathlib import Path

from grpo_megatron.errors import UserError, shortened
from grpo_megatron.files import read_object
from grpo_megatron.model.architecture import Architecture
from grpo_megatron.model.config_json import Fields
from grpo_megatron.model.entries import Entry
from grpo_megatron.model.families import (
    deepseek_v3,
    dense,
    gemma3,
    glm4_moe,
    gpt_oss,
    minimax_m2,
    mixtral,
    qwen3_5,
    qwen3_moe,
    qwen3_next,
)
from grpo_megatron.model.gguf_advice import gguf_advice
from grpo_megatron.model.text_config import text_config
from grpo_megatron.paths import folder_problem, is_absent

_FAMILIES = [
    dense.LLAMA,
    dense.MISTRAL,
    dense.QWEN2,
    dense.QWEN3,
    qwen3_moe.FAMILY,
    mixtral.FAMILY,
    glm4_moe.FAMILY,
    deepseek_v3.FAMILY,
    minimax_m2.FAMILY,
    qwen3_next.FAMILY,
    qwen3_5.DENSE,
    qwen3_5.WITH_EXPERTS,
    gpt_oss.FAMILY,
    gemma3.FAMILY,
]
_BY_ARCHITECTURE = {family.architecture: family for family in _FAMILIES}
_REWARD_MODELS = {family.reward_architecture: family for family in _FAMILIES if family.has_classifier}
_WITH_VISION = {family.vision_architecture: family for family in _FAMILIES if family.vision_architecture}
_BY_NAME = {family.name: family for family in _FAMILIES}


def read_architecture(model_path: str, reward_model: bool = False) -> Architecture:
    """Return the architecture of a model, read from config.json in its Hugging Face folder.

    reward_model: if True, the result has a scalar head, whatever head the checkpoint has. A checkpoint of a
        reward model (*ForSequenceClassification) always has one.

    Raises UserError, which names the file and the key, if config.json is missing or broken, or if the model
    is not supported.
    """
    path = Path(model_path) / "config.json"
    problem = folder_problem(model_path)
    if (problem or is_absent(path)) and (advice := gguf_advice(model_path)):
        raise UserError(f"{model_path} {advice}")
    if problem:
        raise UserError(f"{model_path} {problem}; model.path must be a folder with an HF checkpoint")
    if is_absent(path):
        raise UserError(f"{path} does not exist; model.path must be a folder with an HF checkpoint")
    config = read_object(path)
    names = config.get("architectures") or ["(none)"]
    if not isinstance(names, list) or not isinstance(names[0], str):
        raise UserError(f"{path}: architectures must be a list of names, but is {shortened(repr(names))}")
    known = _BY_ARCHITECTURE | _REWARD_MODELS | _WITH_VISION
    if names[0] not in known:
        raise UserError(
            f"{path}: the architecture {shortened(names[0])} is not supported; supported are "
            f"{', '.join(known)} (docs/adding-a-model.md explains how to add one)"
        )
    try:
        if names[0] in _REWARD_MODELS:
            _must_have_one_label(Fields(config))
        family = known[names[0]]
        arch = family.read(Fields({**family.defaults, **text_config(config)}))
        return arch.as_reward_model() if reward_model or names[0] in _REWARD_MODELS else arch
    except UserError as error:
        raise UserError(f"{path}: {error}") from error


def _must_have_one_label(config: Fields) -> None:
    labels = config.object("id2label")
    # transformers does not write id2label if there are two labels, its default.
    count = len(labels) if labels else config.integer("num_labels", 2)
    if count != 1:
        raise UserError(f"a reward model must have one label, but id2label or num_labels sets {count}")


def reward_architecture(arch: Architecture) -> str:
    """Return the name of transformers' class for reward models of a family, to write it into config.json.

    An example is LlamaForSequenceClassification.

    arch: an architecture of the family.

    Raises UserError if the family has no such class that can be written.
    """
    family = _BY_NAME[arch.family]
    if family.reward_architecture is None:
        known = ", ".join(name for name, family in _BY_NAME.items() if family.has_classifier)
        raise UserError(
            f"a {arch.family} reward model could not be exported, because no class of transformers for it is "
            f"known; use a model of one of these families: {known}"
        )
    return family.reward_architecture


def weight_map(arch: Architecture, transformer_engine: bool = False) -> dict[str, Entry]:
    """Return the weight map of a model: {Megatron name: entry} of all parameters.

    An entry says how a parameter is named, arranged and sharded in Hugging Face checkpoints, Megatron and the
    engine. The entries are in the order of the forward pass.

    transformer_engine: True if Megatron uses TransformerEngine's layers instead of its local layers. In
        TransformerEngine, a linear layer contains the norm before it, so the norm has another Megatron name.
    """
    entries = _BY_NAME[arch.family].entries(arch)
    if transformer_engine:
        entries = [
            replace(entry, megatron=_transformer_engine_name(entry.megatron, arch)) for entry in entries
        ]
    return {entry.megatron: entry for entry in entries}


def _transformer_engine_name(name: str, arch: Architecture) -> str:
    """Return the name that a Megatron parameter has if Megatron uses TransformerEngine's layers.

    name: name of the same parameter in Megatron's local layers.
    """
    fused = {} if arch.latent else {"input_layernorm.": "self_attention.linear_qkv.layer_norm_"}
    layer = name.removeprefix("decoder.layers.").split(".")[0]
    if arch.moe is None or (layer.isdigit() and not arch.moe.layers[int(layer)]):
        fused["pre_mlp_layernorm."] = "mlp.linear_fc1.layer_norm_"  # the norm before a router is not fused
    for local, within in fused.items():
        name = name.replace(f".{local}", f".{within}")
    return name
