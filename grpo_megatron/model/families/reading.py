"""What the families' config.json files have in common."""

from grpo_megatron.errors import UserError, shortened
from grpo_megatron.model.architecture import Architecture, MoE, RopeScaling
from grpo_megatron.model.config_json import MOST_LAYERS, Fields, torch_dtype


def decoder(
    config: Fields,
    family: str,
    qk_norm: bool = False,
    qkv_bias: bool = False,
    windowed: bool = False,
    moe: MoE | None = None,
) -> Architecture:
    """A decoder with rotary embeddings, RMS norms and SwiGLU. Raises UserError for what is not supported.

    windowed: a sliding window in config.json is on, unless it says otherwise.
    """
    # What would change the forward pass and is not implemented must not be ignored.
    if config.flag("attention_bias", False):
        raise UserError("attention_bias=true puts a bias on the attention's output projection too, which is not supported")
    if config.flag("mlp_bias", False):
        raise UserError("mlp_bias=true is not supported")
    activation = config.text("hidden_act", "silu")
    if activation != "silu":
        raise UserError(f"hidden_act={shortened(activation)} is not supported, only silu")
    theta, scaling = rope(config)
    num_heads, num_kv_heads, head_dim = heads(config)
    return Architecture(
        family=family,
        num_layers=num_layers(config),
        hidden_size=config.integer("hidden_size"),
        ffn_hidden_size=config.integer("intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=config.integer("vocab_size"),
        max_positions=_max_positions(config, windowed),
        rope_theta=theta,
        rope_scaling=scaling,
        norm_eps=config.number("rms_norm_eps"),
        qk_norm=qk_norm,
        qkv_bias=qkv_bias,
        tied_embeddings=config.flag("tie_word_embeddings", False),
        dtype=torch_dtype(config),
        moe=moe,
    )


def num_layers(config: Fields) -> int:
    return config.integer("num_hidden_layers", most=MOST_LAYERS)


def top_k(config: Fields, num_experts: int) -> int:
    chosen = config.integer("num_experts_per_tok")
    if chosen > num_experts:
        raise UserError(f"num_experts_per_tok={chosen} is more than the {num_experts} experts")
    return chosen


def _max_positions(config: Fields, windowed: bool) -> int:
    positions = config.integer("max_position_embeddings")
    window = config.integer("sliding_window", None)
    return min(positions, window) if window and config.flag("use_sliding_window", windowed) else positions


def heads(config: Fields) -> tuple[int, int, int]:
    """Heads, KV heads, and the dimension of a head."""
    hidden, count = config.integer("hidden_size"), config.integer("num_attention_heads")
    kv_heads = config.integer("num_key_value_heads", count)
    if count % kv_heads:
        raise UserError(f"num_key_value_heads={kv_heads} does not divide num_attention_heads={count}")
    head_dim = config.integer("head_dim", None)
    if head_dim is None:
        if hidden % count:
            raise UserError(f"num_attention_heads={count} does not divide hidden_size={hidden}, and there is no head_dim")
        head_dim = hidden // count
    if head_dim % 2:
        raise UserError(f"the dimension of a head must be even for rotary embeddings, is {head_dim} (head_dim)")
    return count, kv_heads, head_dim


def rope(config: Fields) -> tuple[float, RopeScaling | None]:
    """Base and scaling of the rotary embedding."""
    # transformers 5 writes rope_parameters; older versions rope_theta and, if needed, rope_scaling.
    parameters = config.object("rope_parameters") or config.object("rope_scaling") or Fields({})
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
