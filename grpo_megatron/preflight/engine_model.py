"""Check that SGLang computes a model as the trainer does, and can divide it as configured."""

import math
from pathlib import Path

from grpo_megatron.config.derived import syncs_adapters
from grpo_megatron.config.engine import LoadFormat
from grpo_megatron.config.rollout import Strategy
from grpo_megatron.config.schema import Config
from grpo_megatron.errors import UserError
from grpo_megatron.files import json_text, read_object
from grpo_megatron.model.architecture import LATENT_NORM_EPS, Architecture
from grpo_megatron.model.block_scaled import BLOCK
from grpo_megatron.model.entries import EngineLayout
from grpo_megatron.model.rope_scaling import LinearScaling, Yarn
from grpo_megatron.model.text_config import text_config
from grpo_megatron.weights.stored import read_stored

# Families with which SGLang 0.5.17 and 0.5.23 support data-parallel attention.
ATTENTION_GROUPS = ("qwen3_moe", "glm4_moe", "deepseek_v3")


def beam_violations(config: Config, arch: Architecture) -> list[str]:
    """Return a list with one sentence if the vocabulary is too small for beam search, otherwise [].

    In each step of a beam search, SGLang takes the (1 + number of end tokens) * rollout.n likeliest tokens.
    It crashes if the vocabulary has fewer tokens.
    """
    rollout = config.rollout
    ends = 1 + len(rollout.stop_token_ids)  # SGLang may know further end tokens of the model
    if rollout.strategy != Strategy.beam or (1 + ends) * rollout.n <= arch.vocab_size:
        return []
    return [
        f"rollout.strategy=beam compares the {(1 + ends) * rollout.n} likeliest tokens for "
        f"rollout.n={rollout.n} beams and {ends} end tokens, but the vocabulary of {config.model.path} has "
        f"only {arch.vocab_size} tokens; lower rollout.n"
    ]


def engine_violations(config: Config, arch: Architecture) -> list[str]:
    """Return one sentence for each reason why SGLang's engines would not compute the model correctly.

    The reasons are parallel sizes that do not divide the model, stop tokens outside the vocabulary, a
    checkpoint in FP8, and properties of the model that SGLang ignores or misreads.
    """
    path, found = config.model.path, _engine_layout(config, arch)
    if arch.family == "mixtral" and arch.head_dim * arch.num_heads != arch.hidden_size:
        found.append(
            f"{path} cannot be used, because it has a head_dim of {arch.head_dim}, which SGLang's Mixtral "
            "ignores; SGLang uses hidden_size / num_attention_heads = "
            f"{arch.hidden_size // arch.num_heads}"
        )
    if arch.moe is not None and arch.tied_embeddings:
        found.append(
            f"{path} cannot be used, because it has tied embeddings (tie_word_embeddings), which SGLang's "
            "models with experts ignore, so they would generate with an uninitialized output layer"
        )
    if arch.family in ("qwen3_moe", "qwen3_next") and not all(arch.moe.layers):
        found.append(
            f"{path} cannot be used, because it has layers without experts (mlp_only_layers, "
            f"decoder_sparse_step), which SGLang's {arch.family} ignores, so it would generate with "
            "uninitialized weights"
        )
    if arch.family == "gemma3" and not arch.tied_embeddings:
        found.append(
            f"{path} cannot be used, because it has an output layer of its own (tie_word_embeddings=false), "
            "which SGLang's Gemma 3 ignores"
        )
    found += _hybrid_engine(config, arch) if arch.delta else []
    found += _engine_with_sinks(config, arch) if arch.sinks else []
    found += _absent_keys(config, arch) + _rotary_engine(path, arch) + _stop_tokens(config, arch)
    return found + (_latent_engine(path, arch) if arch.latent else []) + _quantised_engine(config)


def _hybrid_engine(config: Config, arch: Architecture) -> list[str]:
    """Return one sentence for each reason why SGLang cannot run the model's gated delta networks."""
    path, delta, found = config.model.path, arch.delta, []
    # SGLang ignores layer_types: every layer whose number is a multiple of an interval has attention.
    every = delta.attention_interval
    regular = tuple((layer + 1) % every != 0 for layer in range(arch.num_layers))
    if delta.layers != regular or every > arch.num_layers:
        found.append(
            f"{path} cannot be used, because its layers with attention (layer_types) do not follow each "
            "other at equal distances, which SGLang needs; use it with `sft`, or `train` with rollout.replay"
        )
    if syncs_adapters(config):
        found.append(
            f"weight_sync.lora=adapter: {path} has gated delta networks, whose adapters SGLang cannot "
            "serve; set weight_sync.lora=merged"
        )
    if config.rollout.strategy == Strategy.beam:
        found.append(
            f"rollout.strategy=beam: {path} has gated delta networks, for which SGLang has no beam search; "
            "set rollout.strategy=sampling"
        )
    return found


def _engine_with_sinks(config: Config, arch: Architecture) -> list[str]:
    """Return one sentence for each setting with which SGLang cannot run gpt-oss as it is trained."""
    path, engine, found = config.model.path, config.rollout.engine, []
    if engine.expert_parallel > 1:
        found.append(
            f"rollout.engine.expert_parallel={engine.expert_parallel}: SGLang can divide the experts of "
            f"{path} among ranks only if they are in MXFP4; set rollout.engine.expert_parallel=1"
        )
    dtype = str(arch.dtype).removeprefix("torch.")
    if engine.dtype not in ("auto", dtype):
        found.append(
            f"rollout.engine.dtype={engine.dtype}: SGLang computes parts of {path} in the dtype of its "
            f"config.json, {dtype}; set rollout.engine.dtype=auto"
        )
    return found


def _absent_keys(config: Config, arch: Architecture) -> list[str]:
    """Return a list with one sentence if config.json lacks keys that SGLang needs, otherwise []."""
    path, needed = config.model.path, {}
    if arch.latent:
        needed = {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "moe_layer_freq": 1}
    if arch.family == "minimax_m2":
        needed = {"scoring_func": "sigmoid", "use_qk_norm": True, "use_routing_bias": True}
        if arch.rotary_share != 1:  # SGLang ignores partial_rotary_factor
            needed["rotary_dim"] = 2 * len(arch.rope_frequencies())
    if arch.family == "mixtral" and syncs_adapters(config):
        needed["head_dim"] = arch.head_dim  # for the shapes of adapters; transformers derives no value
    entries = read_object(Path(path) / "config.json") if needed else {}
    missing = [f'"{key}": {json_text(value)}' for key, value in needed.items() if entries.get(key) is None]
    if not missing:
        return []
    return [
        f"{path}/config.json lacks entries that SGLang needs and transformers does not write; add "
        f"{', '.join(missing)}"
    ]


def _rotary_engine(path: str, arch: Architecture) -> list[str]:
    """Return one sentence for each reason why SGLang would compute another rotary embedding, or none.

    path: folder of the model, with its config.json.
    """
    scaling, found = arch.rope_scaling, []
    if scaling is not None and arch.family == "mixtral":
        found.append(
            f"{path} cannot be used, because it scales its rotary embedding (rope_scaling), which SGLang's "
            "Mixtral ignores"
        )
    if isinstance(scaling, LinearScaling) and arch.local_rope_theta is None:
        config = text_config(read_object(Path(path) / "config.json"))
        factor = (config.get("rope_scaling") or config["rope_parameters"])["factor"]
        if isinstance(factor, int):
            found.append(
                f"{path}/config.json has factor={factor} for linear RoPE scaling, with which SGLang fails; "
                f"write {factor}.0"
            )
    return found + (_yarn_engine(path, arch, scaling) if isinstance(scaling, Yarn) else [])


def _yarn_engine(path: str, arch: Architecture, scaling: Yarn) -> list[str]:
    """Return one sentence for each reason why SGLang would compute YaRN RoPE scaling differently, or none."""
    found, longest = [], scaling.original_max_positions * scaling.factor
    if not math.isclose(arch.rope_factor, scaling.derived_cos_factor):
        found.append(
            f"{path} cannot be used, because it sets attention_factor={arch.rope_factor:g} for YaRN RoPE "
            f"scaling, which SGLang ignores; SGLang uses {scaling.derived_cos_factor:g}"
        )
    if arch.latent and not scaling.truncate:
        found.append(
            f"{path} cannot be used, because it has truncate=false for YaRN RoPE scaling, which SGLang "
            "ignores in models with latent attention"
        )
    if arch.max_positions > longest:
        found.append(
            f"{path}/config.json has max_position_embeddings={arch.max_positions}, but YaRN RoPE scaling "
            f"makes factor * original_max_position_embeddings = {longest:g} positions, and SGLang 0.5.17 "
            f"does not scale those beyond; set max_position_embeddings to at most {longest:g}"
        )
    return found


def _stop_tokens(config: Config, arch: Architecture) -> list[str]:
    """Return a list with one sentence if rollout.stop_token_ids has ids outside the vocabulary, otherwise [].

    SGLang accepts ids outside the vocabulary without an error, but they never end a response.
    """
    absent = [token for token in config.rollout.stop_token_ids if token >= arch.vocab_size]
    if not absent:
        return []
    return [
        f"rollout.stop_token_ids={absent}: {config.model.path} has only the tokens 0 to "
        f"{arch.vocab_size - 1}; remove these ids"
    ]


def _engine_layout(config: Config, arch: Architecture) -> list[str]:
    """Return one sentence for each parallel size of the engines that does not suit the model.

    If the sizes are wrong whatever the model, for example because expert_parallel does not divide
    tensor_parallel, the list is empty, because a rule about the configuration reports this error.
    """
    path, engine = config.model.path, EngineLayout.from_config(config.rollout.engine)
    if (
        min(engine.tp, engine.ep, engine.attention_dp) < 1
        or engine.tp % engine.ep
        or engine.tp % engine.attention_dp
    ):
        return []
    found, ranks = [], f"rollout.engine.tensor_parallel={engine.tp}"
    if engine.attention_dp > 1:
        ranks += f" / data_parallel_attention={engine.attention_dp}"
        if arch.family not in ATTENTION_GROUPS:
            found.append(
                f"rollout.engine.data_parallel_attention={engine.attention_dp}: SGLang does not support "
                f"this for {arch.family}, only for {', '.join(ATTENTION_GROUPS)}; set the key to 1"
            )
    if arch.num_heads % engine.attention_tp:
        found.append(
            f"{ranks} does not divide the {arch.num_heads} attention heads of {path}; choose a divisor of "
            f"{arch.num_heads}"
        )
    if arch.delta and arch.delta.key_heads % engine.attention_tp:
        found.append(
            f"{ranks} does not divide the {arch.delta.key_heads} key heads of gated delta networks of "
            f"{path}; choose a divisor of {arch.delta.key_heads}"
        )
    if engine.ep > 1 and arch.moe is None:
        found.append(
            f"rollout.engine.expert_parallel={engine.ep} needs a model with experts, but {path} is dense; "
            "set rollout.engine.expert_parallel=1"
        )
    elif arch.moe and arch.moe.num_experts % engine.ep:
        found.append(
            f"rollout.engine.expert_parallel={engine.ep} does not divide the {arch.moe.num_experts} experts "
            f"of {path}; choose a divisor of {arch.moe.num_experts}"
        )
    elif arch.moe and arch.moe.ffn_hidden_size % engine.moe_tp:
        found.append(
            f"rollout.engine.tensor_parallel={engine.tp} / expert_parallel={engine.ep} does not divide the "
            f"experts' intermediate size {arch.moe.ffn_hidden_size} of {path}; use fewer ranks"
        )
    return found


def _latent_engine(path: str, arch: Architecture) -> list[str]:
    """Return a list with one sentence if a model with latent attention has an unusual rms_norm_eps, else [].

    SGLang uses this value for the norms of latents too, but the model's own code does not.
    """
    if arch.norm_eps == LATENT_NORM_EPS:
        return []
    return [
        f"{path} cannot be used, because it has rms_norm_eps={arch.norm_eps:g}, which SGLang also uses "
        f"for the norms of latents, where the model's own code uses {LATENT_NORM_EPS:g}, so log-probs "
        "would differ"
    ]


def _quantised_engine(config: Config) -> list[str]:
    """Return a list with one sentence if the checkpoint has quantised weights that syncs replace, else [].

    SGLang would keep the weights in FP8 or MXFP4, but a weight sync sends weights of another dtype, unless it
    sends only adapters. A checkpoint that cannot be read also gives [], because the check of its weights
    reports this error.
    """
    path = config.model.path
    try:
        stored = read_stored(Path(path))
    except UserError:
        return []  # the check of the weights reports this error
    if stored.mxfp4:
        return [
            f"{path} has weights in MXFP4 (quantization_config), which SGLang would keep in MXFP4, but "
            "weight syncs send weights that are not in MXFP4; make a copy in bfloat16 with "
            "tools/convert_hf_to_megatron.py and tools/convert_megatron_to_hf.py"
        ]
    block = stored.block
    loads = config.rollout.engine.load_format == LoadFormat.auto
    if block is None or (syncs_adapters(config) and block == (BLOCK, BLOCK) and loads):
        return []
    return [
        f"{path} has FP8 weights (quantization_config), which SGLang would keep in FP8, but weight syncs "
        "send weights that are not in FP8; make a copy without FP8 with tools/convert_hf_to_megatron.py and "
        f"tools/convert_megatron_to_hf.py, or, with blocks of {BLOCK} x {BLOCK}, train only adapters "
        "(megatron.lora.rank) with weight_sync.lora=adapter and rollout.engine.load_format=auto"
    ]
