"""Readers of the config.json keys that the families have in common."""

from collections.abc import Callable

from grpo_megatron.errors import UserError, shortened
from grpo_megatron.model.architecture import Architecture, Latent, MoE
from grpo_megatron.model.config_json import MOST_LAYERS, Fields, torch_dtype
from grpo_megatron.model.rope_scaling import LinearScaling, RopeScaling, Scaling, Yarn

# Types of layers in config.json's layer_types: with attention to all earlier tokens, or to a sliding window.
FULL, SLIDING = "full_attention", "sliding_attention"


def decoder(
    config: Fields,
    family: str,
    qk_norm: bool = False,
    joint_qk_norm: bool = False,
    qkv_bias: bool = False,
    windows: Callable[[Fields], tuple[int | None, ...]] = lambda config: (),
    rotary_share: float | None = None,
    moe: MoE | None = None,
    latent: Latent | None = None,
) -> Architecture:
    """Read the architecture of a decoder with rotary embeddings, RMS norms and SwiGLU from its config.json.

    config: the model's config.json.
    family, qk_norm, joint_qk_norm, qkv_bias, moe, latent: fields of the same name in Architecture.
    windows: function that reads the sliding window of each layer. Without it, there are no windows.
    rotary_share: fraction of a head's channels that is rotated, if config.json lacks the key
        partial_rotary_factor. None: all channels are rotated, and other fractions are not supported.

    Raises UserError for settings that are not supported.
    """
    _refuse_unsupported(config, qkv_bias)
    theta, scaling, share = rope(config, rotary_share, is_latent=latent is not None)
    num_heads, num_kv_heads, head_dim = heads(config) if latent is None else _latent_heads(config, latent)
    if int(head_dim * share) % 2:
        raise UserError(
            f"partial_rotary_factor={share:g} is not supported: it must select an even number of the "
            f"{head_dim} channels of a head"
        )
    return Architecture(
        family=family,
        num_layers=num_layers(config),
        hidden_size=config.integer("hidden_size"),
        ffn_hidden_size=_ffn_hidden_size(config, moe),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=config.integer("vocab_size"),
        max_positions=config.integer("max_position_embeddings"),
        rope_theta=theta,
        rope_scaling=scaling,
        norm_eps=config.number("rms_norm_eps"),
        qk_norm=qk_norm,
        qkv_bias=qkv_bias,
        tied_embeddings=config.flag("tie_word_embeddings", False),
        dtype=torch_dtype(config),
        moe=moe,
        latent=latent,
        rotary_share=share,
        joint_qk_norm=joint_qk_norm,
        windows=windows(config),
    )


def _ffn_hidden_size(config: Fields, moe: MoE | None) -> int:
    """Return the intermediate size of dense MLPs. config.json may lack it if all layers have experts."""
    if moe is not None and all(moe.layers):
        return config.integer("intermediate_size", moe.ffn_hidden_size)
    return config.integer("intermediate_size")


def _refuse_unsupported(config: Fields, qkv_bias: bool) -> None:
    """Raise UserError for settings that would change the forward pass and are not implemented."""
    if config.flag("attention_bias", False) and not qkv_bias:
        raise UserError(
            "attention_bias=true is not supported, because it adds a bias to the attention's output "
            "projection"
        )
    if config.flag("mlp_bias", False):
        raise UserError("mlp_bias=true is not supported; only models without this bias can be used")
    activation = config.text("hidden_act", "silu")
    if activation != "silu":
        raise UserError(f"hidden_act={shortened(activation)} is not supported; only silu can be used")


def num_layers(config: Fields) -> int:
    return config.integer("num_hidden_layers", most=MOST_LAYERS)


def top_k(config: Fields, num_experts: int) -> int:
    """Return the number of experts for each token, from the key num_experts_per_tok.

    config: the model's config.json.
    num_experts: number of experts in a layer.

    Raises UserError if there would be more experts per token than experts.
    """
    chosen = config.integer("num_experts_per_tok")
    if chosen > num_experts:
        raise UserError(f"num_experts_per_tok={chosen} must be at most the number of experts, {num_experts}")
    return chosen


def refuse_one_expert(chosen: int) -> None:
    """Raise UserError if a sigmoid router chooses only one expert for each token."""
    if chosen == 1:
        raise UserError(
            "num_experts_per_tok must be at least 2, because Megatron scales the weights of a token's "
            "experts to sum to 1 only if there are several"
        )


def experts_in_all_layers(config: Fields, **further) -> MoE:
    """Read the settings of router and experts in a model like Mixtral, where every layer has experts.

    further: fields of MoE that differ from their defaults.
    """
    num_experts = config.integer("num_local_experts")
    return MoE(
        num_experts=num_experts,
        top_k=top_k(config, num_experts),
        ffn_hidden_size=config.integer("intermediate_size"),
        normalize=True,
        layers=(True,) * num_layers(config),
        **further,
    )


def softmax_experts(config: Fields, num_experts: int, normalize: bool, **shared) -> MoE:
    """Read the settings of router and experts in a model like Qwen3-MoE, whose router scores with a softmax.

    Layers have a dense MLP if mlp_only_layers lists them, or if decoder_sparse_step does not divide their
    number, counted from 1.

    num_experts: number of routed experts in a layer.
    normalize: value of norm_topk_prob if config.json lacks the key.
    shared: fields of MoE that describe shared experts.
    """
    dense, every = set(config.integers("mlp_only_layers")), config.integer("decoder_sparse_step", 1)
    return MoE(
        num_experts=num_experts,
        top_k=top_k(config, num_experts),
        ffn_hidden_size=config.integer("moe_intermediate_size"),
        normalize=config.flag("norm_topk_prob", normalize),
        layers=tuple(layer not in dense and (layer + 1) % every == 0 for layer in range(num_layers(config))),
        **shared,
    )


def sigmoid_experts(config: Fields) -> MoE:
    """Read the settings of router and experts in a model like DeepSeek-V3 (arXiv:2412.19437) or GLM-4.5.

    The router scores experts with a sigmoid. The first layers, as many as the key first_k_dense_replace says,
    have a dense MLP instead of experts.

    Raises UserError for settings that are not supported.
    """
    num_experts, ffn = config.integer("n_routed_experts"), config.integer("moe_intermediate_size")
    chosen, dense = (
        top_k(config, num_experts),
        config.integer("first_k_dense_replace", most=MOST_LAYERS, least=0),
    )
    for key, expected in (("scoring_func", "sigmoid"), ("topk_method", "noaux_tc")):
        if config.text(key, expected) != expected:
            raise UserError(
                f"{key}={shortened(config.text(key, None))} is not supported; only {expected} can be used"
            )
    if config.integer("moe_layer_freq", 1) != 1:
        raise UserError("moe_layer_freq must be 1; other values are not supported")
    if not config.flag("norm_topk_prob", True):
        raise UserError("norm_topk_prob must be true, because Megatron always scales the weights of experts")
    refuse_one_expert(chosen)
    groups, top_groups = config.integer("n_group"), config.integer("topk_group")
    if top_groups >= groups:
        groups = top_groups = None
    elif num_experts % groups or chosen != 2 * top_groups or chosen > num_experts // groups * top_groups:
        raise UserError(
            f"n_group={groups}, topk_group={top_groups}, n_routed_experts={num_experts} and "
            f"num_experts_per_tok={chosen} are not supported together: the groups must be of equal size and "
            "contain enough experts, and num_experts_per_tok must be twice topk_group"
        )
    return MoE(
        num_experts=num_experts,
        top_k=chosen,
        ffn_hidden_size=ffn,
        normalize=True,
        layers=tuple(layer >= dense for layer in range(num_layers(config))),
        shared_ffn_hidden_size=config.integer("n_shared_experts") * ffn,
        sigmoid=True,
        correction_bias=True,
        groups=groups,
        top_groups=top_groups,
        weight_factor=config.number("routed_scaling_factor"),
    )


def _latent_heads(config: Fields, latent: Latent) -> tuple[int, int, int]:
    """Return (number of query heads, number of KV heads, channels of a query or key head).

    In latent attention, each query head has a key head of its own, so the two numbers of heads are equal.
    Raises UserError if config.json gives different numbers.
    """
    count = config.integer("num_attention_heads")
    kv_heads = config.integer("num_key_value_heads", count)
    if kv_heads != count:
        raise UserError(
            f"num_key_value_heads={kv_heads} must equal num_attention_heads={count} in a model with latent "
            "attention"
        )
    return count, count, latent.plain_dim + latent.rotated_dim


def window_of_all_layers(config: Fields) -> tuple[int, ...]:
    """Return the sliding window of each layer of a model in which all layers have the same, or no window."""
    window = config.integer("sliding_window", None)
    return (window,) * num_layers(config) if window else ()


def window_by_layer(config: Fields) -> tuple[int | None, ...]:
    """Return the sliding window of each layer of a model like Qwen2, or an empty tuple if no layer has one.

    Raises UserError if layer_types does not fit the model.
    """
    window, count = config.integer("sliding_window", None), num_layers(config)
    if not window or not config.flag("use_sliding_window", False):
        return ()
    first = min(config.integer("max_window_layers", least=0), count)
    return windows_by_type(config, window, [FULL] * first + [SLIDING] * (count - first))


def windows_by_type(config: Fields, window: int, types: list[str]) -> tuple[int | None, ...]:
    """Return the sliding window of each layer from layer_types, or an empty tuple if no layer has one.

    window: sliding window of the layers that have one.
    types: value of layer_types if config.json lacks the key.

    Raises UserError if layer_types does not fit the model.
    """
    count, types = num_layers(config), config.texts("layer_types") or types
    if len(types) != count or set(types) - {FULL, SLIDING}:
        raise UserError(f"layer_types must name {FULL} or {SLIDING} for each of the {count} layers")
    return tuple(window if kind == SLIDING else None for kind in types) if SLIDING in types else ()


def heads(config: Fields) -> tuple[int, int, int]:
    """Return (number of query heads, number of KV heads, channels of a head) of grouped-query attention.

    Raises UserError if query heads cannot be divided evenly among KV heads, if hidden_size cannot be divided
    evenly among heads and there is no head_dim, or if the number of channels is odd.
    """
    hidden, count = config.integer("hidden_size"), config.integer("num_attention_heads")
    kv_heads = config.integer("num_key_value_heads", count)
    if count % kv_heads:
        raise UserError(f"num_attention_heads={count} is not divisible by num_key_value_heads={kv_heads}")
    head_dim = config.integer("head_dim", None)
    if head_dim is None:
        if hidden % count:
            raise UserError(
                f"hidden_size={hidden} is not divisible by num_attention_heads={count}; add head_dim"
            )
        head_dim = hidden // count
    if head_dim % 2:
        raise UserError(f"head_dim must be even for rotary embeddings, but is {head_dim}")
    return count, kv_heads, head_dim


# Reasons why engine and trainer would compute different rotary embeddings.
_UNSUPPORTED_ROPE = {
    "dynamic": "its frequencies depend on the length of the sequence in transformers, and not in SGLang",
    "longrope": "within a response, SGLang changes from short_factor to long_factor, but keys that are in "
    "its cache stay rotated by short_factor",
}


def rope(config: Fields, rotary_share: float | None, is_latent: bool) -> tuple[float, Scaling, float]:
    """Read the settings of the rotary embedding from config.json. Return (base, scaling, share).

    - base: base of the frequencies, rope_theta.
    - scaling: scaling of the frequencies, or None if they are not scaled.
    - share: fraction of a head's channels that is rotated.

    rotary_share: value of `share` if config.json does not set it. None: the family supports only 1.
    is_latent: True for a model with latent attention.

    Raises UserError for settings that are not supported.
    """
    name, parameters = _rope_parameters(config)
    key = "partial_rotary_factor"
    share = parameters.number(key, config.number(key, rotary_share or 1.0))
    if share > 1 or (share < 1 and rotary_share is None):
        raise UserError("partial_rotary_factor must be 1 for this model; other values are not supported")
    theta = parameters.number("rope_theta", None) or config.number("rope_theta")
    kind = parameters.text("rope_type", None) or parameters.text("type", "default")
    # SGLang takes every scaling of a model with latent attention for YaRN.
    supported = ("default", "yarn") if is_latent else ("default", "linear", "llama3", "yarn")
    if kind not in supported:
        reason = f", because {_UNSUPPORTED_ROPE[kind]}" if kind in _UNSUPPORTED_ROPE else ""
        raise UserError(
            f"{name}: rope_type {shortened(kind)!r} is not supported{reason}; supported are "
            f"{', '.join(supported)}"
        )
    # Same precedence as in transformers: the key at the top level comes first.
    key = "original_max_position_embeddings"
    positions = config.integer(key, parameters.integer(key, config.integer("max_position_embeddings")))
    if kind == "llama3":
        return theta, _llama3(name, parameters, positions), share
    if kind == "yarn":
        return theta, _yarn(parameters, positions), share
    return theta, LinearScaling(parameters.number("factor")) if kind == "linear" else None, share


def _rope_parameters(config: Fields) -> tuple[str, Fields]:
    """Choose the object in config.json that describes the rotary embedding. Return (its key, the object).

    The choice follows transformers. Version 5 writes the object rope_parameters. Older versions write the key
    rope_theta and, if frequencies are scaled, the object rope_scaling. If there are both objects,
    transformers uses only rope_scaling.

    Raises UserError if settings in rope_parameters would be lost, or if the settings differ between layers.
    """
    scaling, parameters = config.object("rope_scaling"), config.object("rope_parameters")
    name, chosen = ("rope_scaling", scaling) if scaling else ("rope_parameters", parameters or Fields({}))
    if chosen.nested:
        raise UserError(
            f"{name} has different values for different types of layers "
            f"({', '.join(map(shortened, chosen.nested))}), which is not supported"
        )
    for key in ("rope_theta", "partial_rotary_factor") if scaling and parameters else ():
        given = parameters.number(key, None)
        if given not in (None, scaling.number(key, None) or config.number(key, None)):
            raise UserError(
                f"rope_parameters.{key}={given:g} would be lost, because transformers and SGLang ignore "
                "rope_parameters if there is also rope_scaling; move the keys of rope_scaling into "
                "rope_parameters, and delete rope_scaling"
            )
    return name, chosen


def _llama3(name: str, parameters: Fields, original_max_positions: int) -> RopeScaling:
    scaling = RopeScaling(
        factor=parameters.number("factor"),
        low_freq_factor=parameters.number("low_freq_factor"),
        high_freq_factor=parameters.number("high_freq_factor"),
        original_max_positions=original_max_positions,
    )
    if scaling.low_freq_factor >= scaling.high_freq_factor:
        raise UserError(f"{name}: low_freq_factor must be less than high_freq_factor")
    return scaling


def _yarn(parameters: Fields, original_max_positions: int) -> Yarn:
    for key in ("attn_factor", "extrapolation_factor"):
        if parameters.number(key, 1.0) != 1:
            raise UserError(
                f"{key} of YaRN RoPE scaling must be 1, because SGLang uses it and transformers ignores it"
            )
    scaling = Yarn(
        factor=parameters.number("factor"),
        beta_fast=parameters.number("beta_fast", 32.0),
        beta_slow=parameters.number("beta_slow", 1.0),
        original_max_positions=original_max_positions,
        mscale=parameters.number("mscale", None),
        mscale_all_dim=parameters.number("mscale_all_dim", None),
        attention_factor=parameters.number("attention_factor", None),
        truncate=parameters.flag("truncate", True),
    )
    if (scaling.mscale is None) != (scaling.mscale_all_dim is None):
        raise UserError(
            "mscale and mscale_all_dim of YaRN RoPE scaling are only supported together, because libraries "
            "interpret one of them alone differently"
        )
    return scaling
