"""What a model is, read from the HF ``config.json`` alone; nothing is typed by a user."""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

from grpo_megatron.errors import UserError
from grpo_megatron.megatron.parallel import ParallelSizes

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Architecture:
    """Dimensions of a decoder-only transformer. Sizes in elements, theta in radians per position."""

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
    norm_eps: float
    tied_embeddings: bool
    dtype: torch.dtype

    def padded_vocab_size(self, tp: int) -> int:
        """Rows of the embedding on the Megatron side: every TP rank holds equally many."""
        return -(-self.vocab_size // tp) * tp


def read_architecture(model_path: str) -> Architecture:
    """Raises UserError for a missing or broken config.json and for unsupported models."""
    path = Path(model_path) / "config.json"
    if not path.is_file():
        raise UserError(f"{path} does not exist; model.path must be a folder with an HF checkpoint")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise UserError(f"{path} is not valid JSON: {error}") from error
    families = {"Qwen3ForCausalLM": _qwen3}
    name = (config.get("architectures") or ["(none)"])[0]
    if name not in families:
        raise UserError(f"{path}: architecture {name} is not supported; supported: {', '.join(families)}")
    try:
        return families[name](config)
    except KeyError as error:
        raise UserError(f"{path}: key {error} is missing") from error
    except UserError as error:
        raise UserError(f"{path}: {error}") from error


def _qwen3(config: dict) -> Architecture:
    if config.get("attention_bias"):
        raise UserError("attention_bias=true is not supported for Qwen3")
    if config.get("use_sliding_window"):
        raise UserError("use_sliding_window=true is not supported")
    if config.get("hidden_act", "silu") != "silu":
        raise UserError(f"hidden_act={config['hidden_act']} is not supported, only silu")
    heads = config["num_attention_heads"]
    return Architecture(
        family="qwen3",
        num_layers=config["num_hidden_layers"],
        hidden_size=config["hidden_size"],
        ffn_hidden_size=config["intermediate_size"],
        num_heads=heads,
        num_kv_heads=config.get("num_key_value_heads", heads),
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        vocab_size=config["vocab_size"],
        max_positions=config["max_position_embeddings"],
        rope_theta=_rope_theta(config),
        norm_eps=config["rms_norm_eps"],
        tied_embeddings=config.get("tie_word_embeddings", False),
        dtype=_dtype(config),
    )


def _rope_theta(config: dict) -> float:
    # transformers 5 writes rope_parameters, older versions rope_theta and rope_scaling.
    parameters = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    if kind != "default":
        raise UserError(f"rope type {kind!r} is not supported, only the default one")
    return float(parameters.get("rope_theta") or config["rope_theta"])


def _dtype(config: dict) -> torch.dtype:
    name = config.get("dtype") or config.get("torch_dtype") or "float32"
    if name not in _DTYPES:
        raise UserError(f"dtype {name!r} is not supported; supported: {', '.join(_DTYPES)}")
    return _DTYPES[name]


def transformer_config(arch: Architecture, sizes: ParallelSizes, params_dtype: torch.dtype):
    """Megatron's TransformerConfig for this model in this layout, with the local layer spec.

    Every fusion that needs apex or TransformerEngine is off; those settings are also what CPU needs.
    """
    from megatron.core.transformer import TransformerConfig

    return TransformerConfig(
        num_layers=arch.num_layers,
        hidden_size=arch.hidden_size,
        ffn_hidden_size=arch.ffn_hidden_size,
        num_attention_heads=arch.num_heads,
        num_query_groups=arch.num_kv_heads,
        kv_channels=arch.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=arch.norm_eps,
        qk_layernorm=arch.family == "qwen3",
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        attention_softmax_in_fp32=True,
        tensor_model_parallel_size=sizes.tp,
        pipeline_model_parallel_size=sizes.pp,
        context_parallel_size=sizes.cp,
        sequence_parallel=sizes.sequence_parallel,
        params_dtype=params_dtype,
        pipeline_dtype=params_dtype,
        bf16=params_dtype == torch.bfloat16,
        # Weights come from the checkpoint: skip Megatron's random initialisation.
        perform_initialization=False,
        use_cpu_initialization=not torch.cuda.is_available(),
        # The loss function divides by nothing; Megatron divides by the token count it is given
        # (see forward_backward.py).
        calculate_per_token_loss=True,
        # Packs differ in length, so pipeline stages must tell each other the shapes. Megatron
        # insists on the alltoall dispatcher then, for dense models too.
        variable_seq_lengths=sizes.pp > 1,
        moe_token_dispatcher_type="alltoall",
        # On gloo this frees the storage of a tensor that is still being sent.
        deallocate_pipeline_outputs=torch.cuda.is_available(),
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
    )
