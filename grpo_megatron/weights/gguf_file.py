"""Reader of GGUF files (llama.cpp): the equivalent config.json, and dequantised tensors by HF name."""

import math
import re
from dataclasses import dataclass
from functools import cache
from typing import Any

import gguf
import numpy as np
import torch

from grpo_megatron.errors import UserError, shortened
from grpo_megatron.model.architecture import Architecture
from grpo_megatron.model.pieces import Shape
from grpo_megatron.paths import file_problem


@dataclass(frozen=True)
class _Kind:
    """A GGUF architecture: its names in HF, and the differences between its tensors in GGUF and HF files."""

    architecture: str
    """Name of the architecture in the list `architectures` of config.json."""
    model_type: str
    """`model_type` of config.json, such as "qwen2"."""
    permuted: bool = False
    """True if the two channels that RoPE rotates together are adjacent rows of the query and key projections.
    In HF files they are half a head apart."""
    experts: bool = False
    """True if the layers have experts instead of an MLP."""


_KINDS = {
    "llama": _Kind("LlamaForCausalLM", "llama", permuted=True),
    "qwen2": _Kind("Qwen2ForCausalLM", "qwen2"),
    "qwen3": _Kind("Qwen3ForCausalLM", "qwen3"),
    "qwen3moe": _Kind("Qwen3MoeForCausalLM", "qwen3_moe", experts=True),
}
_KEYS = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}
_EXPERT_KEYS = {
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}
_OPTIONAL_KEYS = {"attention.key_length": "head_dim", "rope.freq_base": "rope_theta"}
_ROPE_SCALING = {
    "rope.scaling.type": "rope_type",
    "rope.scaling.factor": "factor",
    "rope.scaling.original_context_length": "original_max_position_embeddings",
}
# Keys that are not copied to config.json. The vocabulary size is read from the shape of the embedding, and
# the other two must be equal to the head size.
_IMPLIED = ("vocab_size", "rope.dimension_count", "attention.value_length")
_TOKENS = {"bos_token_id": "bos_token_id", "eos_token_id": "eos_token_id", "padding_token_id": "pad_token_id"}
_ROPE_FREQUENCIES = "rope_freqs.weight"
# Llama 3.1 and 3.2 differ only in the factor. A GGUF file stores the frequency ratios that follow from these
# numbers, not the numbers.
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


class GGUFFile:
    """A reader of a GGUF file (llama.cpp) that returns the contents as an HF checkpoint would have them.

    `config` returns the equivalent config.json, and `read` returns tensors by their HF names.

    The constructor raises UserError if the file is missing or damaged, if the model is split into several
    files, or if this reader does not support the model's architecture.
    """

    def __init__(self, path: str):
        self.path = path
        if problem := file_problem(path):
            raise UserError(f"{path} {problem}")
        try:
            reader = gguf.GGUFReader(path)
            self._values = {
                key: field.contents()
                for key, field in reader.fields.items()
                if key != "tokenizer.ggml.merges"
            }
        except Exception as error:  # the library raises any type of error for a damaged file
            raise UserError(
                f"{path} cannot be read ({shortened(error, 200)}); it is truncated or not a GGUF file; "
                "download or copy it again"
            ) from error
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}
        parts = self._values.get("split.count", 1)
        if parts > 1:
            raise UserError(
                f"{path} is one of {parts} parts; merge them first with "
                "`llama-gguf-split --merge FIRST_PART OUT.gguf`"
            )
        self.architecture = str(self._values.get("general.architecture"))
        if self.architecture not in _KINDS:
            raise UserError(
                f"{path} has the architecture {shortened(self.architecture)}, but GGUF files can be "
                f"converted only for these: {', '.join(_KINDS)}; use the model's HF checkpoint instead"
            )
        self._kind = _KINDS[self.architecture]
        self._architecture_id = next(
            number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == self.architecture
        )
        self._unread = set(self._tensors)

    def value(self, key: str) -> Any:
        """Return the value of a metadata key, such as "general.architecture"; None if the file lacks it.

        The result is also None for tokenizer.ggml.merges, which is a long list and is not loaded.
        """
        return self._values.get(key)

    def config(self) -> dict[str, Any]:
        """Return the contents of the config.json that an HF checkpoint of this model would have.

        Raises UserError if a metadata value is missing, has the wrong type or is not supported. Raises
        UserError also for an unknown metadata key of the architecture, which may change the model's outputs.
        """
        prefix = f"{self.architecture}."
        own = {
            key.removeprefix(prefix): value for key, value in self._values.items() if key.startswith(prefix)
        }
        needed = _KEYS | (_EXPERT_KEYS if self._kind.experts else {})
        names = needed | _OPTIONAL_KEYS
        unknown = sorted(own.keys() - names.keys() - _ROPE_SCALING.keys() - set(_IMPLIED))
        if unknown:
            raise UserError(
                f"{self.path}: the metadata key {prefix}{unknown[0]} is not supported; use the model's HF "
                "checkpoint"
            )
        if missing := sorted(needed.keys() - own.keys()):
            raise UserError(
                f"{self.path}: the metadata key {prefix}{missing[0]} is missing; the file is damaged or for "
                "a different kind of model, so download it again or use the model's HF checkpoint"
            )
        for key in names.keys() & own.keys():
            if not isinstance(own[key], int | float):
                raise UserError(
                    f"{self.path}: {prefix}{key} must be one number, but is {shortened(repr(own[key]))}; use "
                    "the model's HF checkpoint"
                )
        config = {
            "architectures": [self._kind.architecture],
            "model_type": self._kind.model_type,
            "rope_theta": 10000.0,
        }
        config |= {names[key]: _plain(value) for key, value in own.items() if key in names}
        config["vocab_size"] = self._shape("token_embd.weight")[0]
        config["tie_word_embeddings"] = "output.weight" not in self._tensors
        config |= self._head_dim(config, own) | self._rope(config, own)
        if self._kind.experts:
            config["norm_topk_prob"] = True  # llama.cpp always normalises for this architecture
        return config | self.special_tokens()

    def special_tokens(self) -> dict[str, int]:
        """Return the ids of the model's special tokens by their HF names, such as {"eos_token_id": 2}.

        An HF checkpoint has these ids in config.json and generation_config.json. Tokens without an id in the
        file are left out.
        """
        ids = {name: self.value(f"tokenizer.ggml.{key}") for key, name in _TOKENS.items()}
        return {name: int(value) for name, value in ids.items() if value is not None}

    def _head_dim(self, config: dict[str, Any], own: dict[str, Any]) -> dict[str, int]:
        given = config.get("head_dim") or own.get("rope.dimension_count")
        head_dim = given or config["hidden_size"] // max(config["num_attention_heads"], 1)
        for key in ("rope.dimension_count", "attention.value_length"):
            if own.get(key, head_dim) != head_dim:
                raise UserError(
                    f"{self.path}: {key}={own[key]} is not supported; only the head size {head_dim} can be "
                    "used. Use the model's HF checkpoint"
                )
        return {"head_dim": head_dim}

    def _rope(self, config: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
        theta = config["rope_theta"]
        scaling = {name: _plain(own[key]) for key, name in _ROPE_SCALING.items() if key in own}
        if _ROPE_FREQUENCIES in self._tensors:
            scaling = self._llama3(theta)
        elif scaling.get("rope_type", "none") == "none":
            return {}
        return {"rope_scaling": {**scaling, "rope_theta": theta}}

    def _llama3(self, theta: float) -> dict[str, Any]:
        """Return HF's `rope_scaling` dict for Llama 3's RoPE scaling, without the key rope_theta.

        The file does not store the parameters of the scaling. It stores a divisor for each RoPE frequency.
        The parameter "factor" is the largest divisor. Raises UserError if the divisors do not fit Llama 3's
        formula.

        theta: the base of RoPE's frequencies (rope_theta).
        """
        stored = self._values_of(_ROPE_FREQUENCIES).double()
        factor = float(stored.max())
        exponents = torch.arange(len(stored), dtype=torch.float64) / len(stored)
        turns = _LLAMA3["original_max_position_embeddings"] / (2 * math.pi * theta**exponents)
        low, high = _LLAMA3["low_freq_factor"], _LLAMA3["high_freq_factor"]
        share = ((turns - low) / (high - low)).clamp(0, 1)
        if not torch.allclose(1 / ((1 - share) / factor + share), stored, rtol=1e-3):
            raise UserError(
                f"{self.path}: {_ROPE_FREQUENCIES} is not Llama 3's RoPE scaling, which is the only one "
                "supported; use the model's HF checkpoint"
            )
        return {"rope_type": "llama3", "factor": factor, **_LLAMA3}

    def read(self, name: str, arch: Architecture) -> torch.Tensor:
        """Return the tensor with the HF name `name`, dequantised to float32 and with its rows in HF's order.

        Afterwards the property `unread` no longer lists the tensor.

        arch: architecture of the model.
        Raises UserError if the file lacks the tensor, has it in an unknown quantisation, or has another
        number of experts than `arch`.
        """
        expert = re.search(r"\.experts\.(\d+)\.", name)
        stem, kind = name.replace(expert[0], ".experts.").rsplit(".", 1) if expert else name.rsplit(".", 1)
        stored = f"{_names(self._architecture_id, arch.num_layers).get_name(stem)}.{kind}"
        if expert and self._shape(stored)[0] != arch.moe.num_experts:
            raise UserError(
                f"{self.path}: {stored} has {self._shape(stored)[0]} experts, but the metadata specifies "
                f"{arch.moe.num_experts}; download the file again"
            )
        values = self._values_of(stored, int(expert[1]) if expert else None)
        for projection, heads in ((".q_proj.", arch.num_heads), (".k_proj.", arch.num_kv_heads)):
            if self._kind.permuted and projection in name:
                values = values.view(heads, -1, 2, *values.shape[1:]).transpose(1, 2).reshape(values.shape)
        return values

    def _shape(self, name: str) -> Shape:
        if name not in self._tensors:
            raise UserError(f"{self.path}: tensor {name} is missing; download the file again")
        return tuple(int(size) for size in reversed(self._tensors[name].shape))

    def _values_of(self, name: str, expert: int | None = None) -> torch.Tensor:
        """Return a tensor of the file, dequantised to float32.

        name: GGUF name of the tensor.
        expert: index of the only expert to return, if the tensor has all experts of a layer. None: return the
            whole tensor.
        Raises UserError if the file lacks the tensor, or has it in an unknown quantisation.
        """
        shape, tensor = self._shape(name), self._tensors[name]
        self._unread.discard(name)
        stored, shape = (tensor.data, shape) if expert is None else (tensor.data[expert], shape[1:])
        try:
            values = gguf.dequantize(stored, tensor.tensor_type)
        except NotImplementedError as error:
            raise UserError(
                f"{self.path}: {name} has the type {tensor.tensor_type.name}, which is not supported; use "
                "the model's HF checkpoint"
            ) from error
        return torch.from_numpy(np.array(values, dtype=np.float32)).view(shape)

    @property
    def unread(self) -> list[str]:
        """Sorted GGUF names of the tensors that have not been read yet, to check that none was forgotten."""
        return sorted(self._unread)


@cache
def _names(architecture: gguf.MODEL_ARCH, num_layers: int) -> gguf.TensorNameMap:
    """Return the gguf package's map from HF tensor names to GGUF tensor names, for a model of this depth."""
    return gguf.get_tensor_name_map(architecture, num_layers)


def _plain(value: Any) -> Any:
    """Return a float with only the digits that a float32 has, such as 1e-05 for 9.999999747378752e-06.

    GGUF stores numbers as float32, and config.json should contain them as the model's author wrote them.
    Values that are not floats are returned unchanged.
    """
    return float(str(np.float32(value))) if isinstance(value, float) else value
