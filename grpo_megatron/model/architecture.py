"""What a model is, read from the HF ``config.json`` alone; nothing is typed by a user."""

import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from grpo_megatron.batch.layout import padded_to
from grpo_megatron.batch.schedule import CostModel
from grpo_megatron.errors import UserError, shortened
from grpo_megatron.json_files import read_object
from grpo_megatron.paths import folder_problem, is_absent

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
        return padded_to(self.vocab_size, tp)

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


# Beyond these, a number in config.json is damage: working with it would take for ever.
_MOST = 2**31 - 1
_MOST_LAYERS = 10_000
_REQUIRED = object()


class _Fields:
    """The keys of config.json by type. A key that is null counts as absent, as transformers writes it.

    Every method raises UserError for a key of another type or out of its range, or, without a default, for its absence.
    """

    def __init__(self, values: dict[str, Any], within: str = ""):
        """within: the key whose object this is, for messages."""
        self._values, self._within = values, f"{within}." if within else ""

    def _get(self, key: str, default: Any, kinds: tuple[type, ...], what: str) -> Any:
        value = self._values.get(key)
        if value is None:
            if default is _REQUIRED:
                raise UserError(f"key {self._within}{key} is missing")
            return default
        if type(value) not in kinds:
            raise self._refusal(key, what)
        return value

    def _refusal(self, key: str, what: str) -> UserError:
        return UserError(f"{self._within}{key} must be {what}, is {shortened(repr(self._values[key]))}")

    def integer(self, key: str, default: Any = _REQUIRED, most: int = _MOST) -> Any:
        """From 1 to `most`."""
        what = f"an integer from 1 to {most}"
        value = self._get(key, default, (int,), what)
        if value is not default and not 1 <= value <= most:
            raise self._refusal(key, what)
        return value

    def number(self, key: str, default: Any = _REQUIRED) -> Any:
        """Finite and greater than 0, as a float."""
        what = "a finite number greater than 0"
        value = self._get(key, default, (int, float), what)
        if value is default:
            return default
        if not 0 < value <= sys.float_info.max:
            raise self._refusal(key, what)
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        return self._get(key, default, (bool,), "true or false")

    def text(self, key: str, default: Any) -> Any:
        return self._get(key, default, (str,), "text")

    def integers(self, key: str) -> list[int]:
        """Empty where absent."""
        value = self._get(key, [], (list,), "a list of integers")
        if not all(type(item) is int for item in value):
            raise self._refusal(key, "a list of integers")
        return value

    def object(self, key: str) -> "_Fields | None":
        value = self._get(key, None, (dict,), "an object")
        return _Fields(value, key) if value else None


def read_architecture(model_path: str) -> Architecture:
    """Raises UserError, which names file and key, for a missing or broken config.json and for unsupported models."""
    problem = folder_problem(model_path)
    if problem:
        raise UserError(f"{model_path} {problem}; model.path must be a folder with an HF checkpoint")
    path = Path(model_path) / "config.json"
    if is_absent(path):
        raise UserError(f"{path} does not exist; model.path must be a folder with an HF checkpoint")
    config = read_object(path)
    names = config.get("architectures") or ["(none)"]
    if not isinstance(names, list) or not isinstance(names[0], str):
        raise UserError(f"{path}: architectures must be a list of names, is {shortened(repr(names))}")
    if names[0] not in _FAMILIES:
        raise UserError(f"{path}: architecture {shortened(names[0])} is not supported; supported: {', '.join(_FAMILIES)}")
    try:
        return _read(_Fields(config), *_FAMILIES[names[0]])
    except UserError as error:
        raise UserError(f"{path}: {error}") from error


def _read(config: _Fields, family: str, qk_norm: bool, qkv_bias: bool) -> Architecture:
    # What would change the forward pass and is not implemented must not be ignored.
    if config.flag("attention_bias", False):
        raise UserError("attention_bias=true puts a bias on the attention's output projection too, which is not supported")
    if config.flag("mlp_bias", False):
        raise UserError("mlp_bias=true is not supported")
    activation = config.text("hidden_act", "silu")
    if activation != "silu":
        raise UserError(f"hidden_act={shortened(activation)} is not supported, only silu")
    max_positions = config.integer("max_position_embeddings")
    # Qwen states a window that only use_sliding_window switches on; Mistral's is always on.
    window = config.integer("sliding_window", None)
    if window and config.flag("use_sliding_window", family in ("mistral", "mixtral")):
        max_positions = min(max_positions, window)
    theta, scaling = _rope(config)
    heads, kv_heads, head_dim = _heads(config)
    return Architecture(
        family=family,
        num_layers=config.integer("num_hidden_layers", most=_MOST_LAYERS),
        hidden_size=config.integer("hidden_size"),
        ffn_hidden_size=config.integer("intermediate_size"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=config.integer("vocab_size"),
        max_positions=max_positions,
        rope_theta=theta,
        rope_scaling=scaling,
        norm_eps=config.number("rms_norm_eps"),
        qk_norm=qk_norm,
        qkv_bias=qkv_bias,
        tied_embeddings=config.flag("tie_word_embeddings", False),
        dtype=_dtype(config),
        moe=_moe(config, family),
    )


def _heads(config: _Fields) -> tuple[int, int, int]:
    """Heads, KV heads, and the dimension of a head."""
    hidden, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    kv_heads = config.integer("num_key_value_heads", heads)
    if heads % kv_heads:
        raise UserError(f"num_key_value_heads={kv_heads} does not divide num_attention_heads={heads}")
    head_dim = config.integer("head_dim", None)
    if head_dim is None:
        if hidden % heads:
            raise UserError(f"num_attention_heads={heads} does not divide hidden_size={hidden}, and there is no head_dim")
        head_dim = hidden // heads
    if head_dim % 2:
        raise UserError(f"the dimension of a head must be even for rotary embeddings, is {head_dim} (head_dim)")
    return heads, kv_heads, head_dim


def _moe(config: _Fields, family: str) -> MoE | None:
    if family not in ("mixtral", "qwen3_moe"):
        return None
    num_layers = config.integer("num_hidden_layers", most=_MOST_LAYERS)
    if family == "mixtral":
        num_experts, ffn, normalize = config.integer("num_local_experts"), config.integer("intermediate_size"), True
        layers = (True,) * num_layers
    else:
        num_experts = config.integer("num_experts", None) or config.integer("num_local_experts")
        ffn, normalize = config.integer("moe_intermediate_size"), config.flag("norm_topk_prob", False)
        dense, every = set(config.integers("mlp_only_layers")), config.integer("decoder_sparse_step", 1)
        layers = tuple(layer not in dense and (layer + 1) % every == 0 for layer in range(num_layers))
    top_k = config.integer("num_experts_per_tok")
    if top_k > num_experts:
        raise UserError(f"num_experts_per_tok={top_k} is more than the {num_experts} experts")
    return MoE(num_experts, top_k, ffn, normalize, layers)


def _rope(config: _Fields) -> tuple[float, RopeScaling | None]:
    # transformers 5 writes rope_parameters; older versions rope_theta and, if needed, rope_scaling.
    parameters = config.object("rope_parameters") or config.object("rope_scaling") or _Fields({})
    if parameters.number("partial_rotary_factor", config.number("partial_rotary_factor", 1.0)) != 1.0:
        raise UserError("partial_rotary_factor other than 1 is not supported")
    theta = parameters.number("rope_theta", None) or config.number("rope_theta")
    kind = parameters.text("rope_type", None) or parameters.text("type", "default")
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise UserError(f"rope type {shortened(kind)!r} is not supported; supported: default, llama3")
    scaling = RopeScaling(
        factor=parameters.number("factor"),
        low_freq_factor=parameters.number("low_freq_factor"),
        high_freq_factor=parameters.number("high_freq_factor"),
        original_max_positions=parameters.integer("original_max_position_embeddings"),
    )
    if scaling.low_freq_factor >= scaling.high_freq_factor:
        raise UserError("low_freq_factor of the rope scaling must be less than its high_freq_factor")
    return theta, scaling


def _dtype(config: _Fields) -> torch.dtype:
    name = config.text("dtype", None) or config.text("torch_dtype", "float32")
    if name not in _DTYPES:
        raise UserError(f"dtype {shortened(name)!r} is not supported; supported: {', '.join(_DTYPES)}")
    return _DTYPES[name]
