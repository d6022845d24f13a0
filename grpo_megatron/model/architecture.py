"""What a model is, read from the HF ``config.json`` alone; nothing is typed by a user."""

import json
import math
from dataclasses import dataclass
from pathlib import Path

import torch

from grpo_megatron.batch.schedule import CostModel
from grpo_megatron.errors import UserError

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3's frequency scaling: long wavelengths are stretched by `factor`, short ones kept."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


@dataclass(frozen=True)
class MoE:
    """Experts of the layers that have them; the router takes the top_k of a softmax.

    ffn_hidden_size: of one expert. normalize: the chosen weights are scaled to sum to 1.
    layers: True for layers with experts, False for those with a dense MLP.
    """

    num_experts: int
    top_k: int
    ffn_hidden_size: int
    normalize: bool
    layers: tuple[bool, ...]


@dataclass(frozen=True)
class Architecture:
    """Dimensions of a decoder-only transformer. Sizes in elements, theta in radians per position.

    max_positions: the longest sequence the model is defined for here; where config.json sets a
    sliding window, that window, within which the window makes no difference.
    """

    family: str
    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int
    rope_theta: float
    rope_scaling: RopeScaling | None
    norm_eps: float
    qk_norm: bool
    qkv_bias: bool
    tied_embeddings: bool
    dtype: torch.dtype
    moe: MoE | None = None

    def padded_vocab_size(self, tp: int) -> int:
        """Rows of the embedding on the Megatron side: every TP rank holds equally many."""
        return -(-self.vocab_size // tp) * tp

    def rope_frequencies(self) -> torch.Tensor:
        """Inverse frequencies of the rotary embedding, float32 [head_dim / 2] (arXiv:2104.09864).

        With `rope_scaling` as in Llama 3.1: wavelengths beyond original / low are divided by the
        factor, those below original / high are kept, and between them the two are interpolated.
        """
        exponents = torch.arange(0, self.head_dim, 2, dtype=torch.float32) / self.head_dim
        frequencies = 1.0 / (self.rope_theta**exponents)
        scaling = self.rope_scaling
        if scaling is None:
            return frequencies
        wavelength = 2 * math.pi / frequencies
        share = (scaling.original_max_positions / wavelength - scaling.low_freq_factor) / (
            scaling.high_freq_factor - scaling.low_freq_factor
        )
        share = share.clamp(0.0, 1.0)
        return (1 - share) * frequencies / scaling.factor + share * frequencies

    @property
    def cost_model(self) -> CostModel:
        """FLOPs of a forward pass, two per multiply-add; a backward pass costs the same in proportion.

        Per token: the projections of attention, the MLP (router and top_k experts in layers that have them) and the
        vocabulary head (a quarter of the weights of a 0.5B model). Norms, rotary embedding and softmax are left out.
        """
        attention = 2 * self.hidden_size * self.head_dim * (self.num_heads + self.num_kv_heads)
        mlp = 3 * self.hidden_size * self.ffn_hidden_size
        weights = self.num_layers * (attention + mlp) + self.hidden_size * self.vocab_size
        if self.moe is not None:
            experts = self.hidden_size * (self.moe.num_experts + 3 * self.moe.top_k * self.moe.ffn_hidden_size)
            weights += sum(self.moe.layers) * (experts - mlp)
        # A pair: the product of query and key, and the key's value times its probability.
        return CostModel(per_token=2.0 * weights, per_pair=4.0 * self.num_layers * self.num_heads * self.head_dim)


# HF architecture name -> (family, q/k norms, whether a QKV bias is there unless config.json says so)
_FAMILIES = {
    "LlamaForCausalLM": ("llama", False, False),
    "MistralForCausalLM": ("mistral", False, False),
    "Qwen2ForCausalLM": ("qwen2", False, True),
    "Qwen3ForCausalLM": ("qwen3", True, False),
    "Qwen3MoeForCausalLM": ("qwen3_moe", True, False),
    "MixtralForCausalLM": ("mixtral", False, False),
}


def read_architecture(model_path: str) -> Architecture:
    """Raises UserError for a missing or broken config.json and for unsupported models."""
    path = Path(model_path) / "config.json"
    if not path.is_file():
        raise UserError(f"{path} does not exist; model.path must be a folder with an HF checkpoint")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise UserError(f"{path} is not valid JSON: {error}") from error
    name = (config.get("architectures") or ["(none)"])[0]
    if name not in _FAMILIES:
        raise UserError(f"{path}: architecture {name} is not supported; supported: {', '.join(_FAMILIES)}")
    try:
        return _read(config, *_FAMILIES[name])
    except KeyError as error:
        raise UserError(f"{path}: key {error} is missing") from error
    except UserError as error:
        raise UserError(f"{path}: {error}") from error


def _read(config: dict, family: str, qk_norm: bool, qkv_bias: bool) -> Architecture:
    # What would change the forward pass and is not implemented must not be ignored.
    if config.get("attention_bias", False):
        raise UserError("attention_bias=true puts a bias on the attention's output projection too, which is not supported")
    if config.get("mlp_bias", False):
        raise UserError("mlp_bias=true is not supported")
    if config.get("hidden_act", "silu") != "silu":
        raise UserError(f"hidden_act={config['hidden_act']} is not supported, only silu")
    heads = config["num_attention_heads"]
    max_positions = config["max_position_embeddings"]
    # Qwen states a window that only use_sliding_window switches on; Mistral's is always on.
    window = config.get("sliding_window")
    if window and config.get("use_sliding_window", family in ("mistral", "mixtral")):
        max_positions = min(max_positions, window)
    theta, scaling = _rope(config)
    return Architecture(
        family=family,
        num_layers=config["num_hidden_layers"],
        hidden_size=config["hidden_size"],
        ffn_hidden_size=config["intermediate_size"],
        num_heads=heads,
        num_kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        vocab_size=config["vocab_size"],
        max_positions=max_positions,
        rope_theta=theta,
        rope_scaling=scaling,
        norm_eps=config["rms_norm_eps"],
        qk_norm=qk_norm,
        qkv_bias=qkv_bias,
        tied_embeddings=config.get("tie_word_embeddings", False),
        dtype=_dtype(config),
        moe=_moe(config, family),
    )


def _moe(config: dict, family: str) -> MoE | None:
    num_layers = config["num_hidden_layers"]
    if family == "mixtral":
        return MoE(
            num_experts=config["num_local_experts"],
            top_k=config["num_experts_per_tok"],
            ffn_hidden_size=config["intermediate_size"],
            normalize=True,
            layers=(True,) * num_layers,
        )
    if family == "qwen3_moe":
        dense, every = set(config.get("mlp_only_layers") or ()), config.get("decoder_sparse_step", 1)
        layers = tuple(layer not in dense and (layer + 1) % every == 0 for layer in range(num_layers))
        return MoE(
            num_experts=config.get("num_experts") or config["num_local_experts"],
            top_k=config["num_experts_per_tok"],
            ffn_hidden_size=config["moe_intermediate_size"],
            normalize=config.get("norm_topk_prob", False),
            layers=layers,
        )
    return None


def _rope(config: dict) -> tuple[float, RopeScaling | None]:
    # transformers 5 writes rope_parameters; older versions rope_theta and, if needed, rope_scaling.
    parameters = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if parameters.get("partial_rotary_factor", config.get("partial_rotary_factor") or 1.0) != 1.0:
        raise UserError("partial_rotary_factor other than 1 is not supported")
    theta = float(parameters.get("rope_theta") or config["rope_theta"])
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise UserError(f"rope type {kind!r} is not supported; supported: default, llama3")
    return theta, RopeScaling(
        factor=float(parameters["factor"]),
        low_freq_factor=float(parameters["low_freq_factor"]),
        high_freq_factor=float(parameters["high_freq_factor"]),
        original_max_positions=int(parameters["original_max_position_embeddings"]),
    )


def _dtype(config: dict) -> torch.dtype:
    name = config.get("dtype") or config.get("torch_dtype") or "float32"
    if name not in _DTYPES:
        raise UserError(f"dtype {name!r} is not supported; supported: {', '.join(_DTYPES)}")
    return _DTYPES[name]
