"""Check that the model suits the configured parallel layout, engines and lengths."""

from dataclasses import replace
from pathlib import Path

from grpo_megatron.config.command import Command
from grpo_megatron.config.derived import scores_on_ranks
from grpo_megatron.config.rollout import Strategy
from grpo_megatron.config.schema import Config
from grpo_megatron.errors import UserError
from grpo_megatron.files import json_text, read_object
from grpo_megatron.model.adapters import without_adapter
from grpo_megatron.model.architecture import LATENT_NORM_EPS, Architecture
from grpo_megatron.model.entries import EngineLayout
from grpo_megatron.model.families import read_architecture, reward_architecture, weight_map
from grpo_megatron.model.parallel_sizes import ParallelSizes
from grpo_megatron.preflight.engine_fp8 import engine_fp8_violations
from grpo_megatron.preflight.fp8_sizes import fp8_violations
from grpo_megatron.preflight.layout import layout_violations_of_model
from grpo_megatron.weights.hf_checkpoint import HFCheckpoint
from grpo_megatron.weights.stored import read_stored

# Families for which SGLang 0.5.17 and 0.5.23 support data-parallel attention.
ATTENTION_GROUPS = ("qwen3_moe", "glm4_moe", "deepseek_v3")


def check_model(config: Config, command: Command = Command.train) -> Architecture:
    """Check the model against the configuration before any process starts. Return its architecture.

    Raises UserError with all violations that were found.
    """
    arch = read_architecture(config.model.path)
    found = model_violations(config, arch, command)
    if found:
        raise UserError(
            f"{config.model.path} does not fit the configuration:\n"
            + "\n".join(f"  - {rule}" for rule in found)
        )
    return arch


def model_violations(config: Config, arch: Architecture, command: Command = Command.train) -> list[str]:
    """Return one sentence for each reason why the model cannot run with this configuration.

    The headers of the weights in model.path, ref.path and reward.model.path are read, as far as the command
    uses these models.

    arch: architecture of model.path.
    command: train, sft, reward-model or eval. `eval` has only engines. `train` has engines unless it replays
        recorded samples.
    """
    found = architecture_violations(config, arch, command)
    if command == Command.reward_model:
        try:
            reward_architecture(arch)
        except UserError as error:
            found.append(f"{config.model.path}: {error}")
        return found + _weights(config.model.path, arch)
    reference = config.ref.path if command.trains else None
    for path in dict.fromkeys([config.model.path, reference or config.model.path]):
        found += _weights(path, arch)
    return found + reward_model_violations(config, weights=True)


def reward_model_violations(config: Config, weights: bool = False) -> list[str]:
    """Return one sentence for each reason why the reward model cannot run on the trainer's ranks.

    The ranks have the parallel sizes of the trained model. The list is empty if the run has no reward model.

    weights: If True, read the headers of the reward model's weights, in addition to its config.json.
    """
    path = config.reward.model.path
    if not scores_on_ranks(config) or not path:
        return []
    try:
        arch = read_architecture(path)
    except UserError as error:
        return [f"reward.model.path: {error}"]
    if not arch.scalar_head:
        return [
            f"reward.model.path: {path} is a language model, not a reward model; train a reward model from "
            "it with `grpo-megatron reward-model`"
        ]
    sizes = replace(ParallelSizes.from_config(config.megatron), pipeline_layers=None)
    unfit = layout_violations_of_model(sizes, arch)
    found = [
        f"reward.model.path={path} does not fit the parallel sizes in megatron.*: {rule}" for rule in unfit
    ]
    return found + _weights(path, arch) if weights else found


def architecture_violations(
    config: Config, arch: Architecture, command: Command = Command.train
) -> list[str]:
    """Return those sentences of `model_violations` that follow from the model's config.json alone.

    The model's folder need not contain weights, so the planner can use this function.
    """
    found = []
    if arch.scalar_head and command != Command.reward_model:
        found.append(
            f"{config.model.path} is a reward model, which has no output projection, so `{command}` cannot "
            "use it; set model.path to a language model"
        )
    if command == Command.eval:
        return found + _engine(config, arch) + _longest(config, arch, command)
    found += layout_violations_of_model(ParallelSizes.from_config(config.megatron), arch)
    if command == Command.train and not config.rollout.replay:
        found += _engine(config, arch) + _beams(config, arch)
        if not found:  # else an uneven split would be reported again, as cut blocks
            found += engine_fp8_violations(config, arch)
    found += fp8_violations(config, arch)
    if config.megatron.lora.rank > 0:
        found += without_adapter(arch, config.megatron.lora)
    return found + _longest(config, arch, command)


def _longest(config: Config, arch: Architecture, command: Command) -> list[str]:
    """Return a sentence for each prompt-plus-response length that exceeds the model's positions."""
    lengths = {"rollout.max_response_length": config.rollout.max_response_length}
    evaluated = {"eval.max_response_length": config.eval.max_response_length}
    if config.eval.max_response_length and command == Command.eval:
        lengths = evaluated
    elif config.eval.max_response_length and command == Command.train and config.data.eval:
        lengths |= evaluated
    return [
        f"data.max_prompt_length + {key} = {config.data.max_prompt_length + length}, but "
        f"{config.model.path} supports only {arch.max_positions} positions; lower one of the two"
        for key, length in lengths.items()
        if config.data.max_prompt_length + length > arch.max_positions
    ]


def _beams(config: Config, arch: Architecture) -> list[str]:
    """Return [a sentence] if the vocabulary is too small for beam search, else [].

    SGLang compares the likeliest tokens. Their number grows with rollout.n, and SGLang crashes if the
    vocabulary has fewer tokens.
    """
    rollout = config.rollout
    ends = 1 + len(rollout.stop_token_ids)  # the model may have further end tokens that only SGLang knows
    if rollout.strategy != Strategy.beam or (1 + ends) * rollout.n <= arch.vocab_size:
        return []
    return [
        f"rollout.strategy=beam compares the {(1 + ends) * rollout.n} likeliest tokens for "
        f"rollout.n={rollout.n} beams with {ends} kinds of end, but {config.model.path} has only "
        f"{arch.vocab_size}; lower rollout.n"
    ]


def _engine(config: Config, arch: Architecture) -> list[str]:
    """Return one sentence for each property of the checkpoint that SGLang would silently ignore or change."""
    path, found = config.model.path, _engine_layout(config, arch)
    if arch.family == "mixtral" and arch.head_dim * arch.num_heads != arch.hidden_size:
        found.append(
            f"{path} cannot be used, because it has a head_dim of {arch.head_dim}, which SGLang's Mixtral "
            f"ignores; it uses hidden_size / num_attention_heads = {arch.hidden_size // arch.num_heads}"
        )
    if arch.moe is not None and arch.tied_embeddings:
        found.append(
            f"{path} cannot be used, because it has tied embeddings (tie_word_embeddings), which SGLang's "
            "models with experts ignore, so they would generate with an uninitialized output layer"
        )
    if arch.family == "qwen3_moe" and not all(arch.moe.layers):
        found.append(
            f"{path} cannot be used, because it has layers without experts (mlp_only_layers, "
            "decoder_sparse_step), which SGLang's Qwen3-MoE ignores, so it would generate with "
            "uninitialized weights"
        )
    found += _stop_tokens(config, arch)
    return found + (_latent_engine(path, arch) if arch.latent else []) + _quantised_engine(path)


def _stop_tokens(config: Config, arch: Architecture) -> list[str]:
    """Return [a sentence] if rollout.stop_token_ids has ids outside the vocabulary, else [].

    Such a token never ends a response, and SGLang does not report it.
    """
    absent = [token for token in config.rollout.stop_token_ids if token >= arch.vocab_size]
    if not absent:
        return []
    return [
        f"rollout.stop_token_ids={absent}: {config.model.path} has only the tokens 0 to "
        f"{arch.vocab_size - 1}; remove these ids"
    ]


def _engine_layout(config: Config, arch: Architecture) -> list[str]:
    """Return one sentence for each parallel size of the engines that does not divide the model evenly.

    The list is empty if the parallel sizes do not divide each other, because another rule reports that.
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
                f"this for {arch.family}, only for {', '.join(ATTENTION_GROUPS)}; set it to 1"
            )
    if arch.num_heads % engine.attention_tp:
        found.append(
            f"{ranks} does not divide the {arch.num_heads} attention heads of {path}; set it to a divisor "
            f"of {arch.num_heads}"
        )
    if engine.ep > 1 and arch.moe is None:
        found.append(
            f"rollout.engine.expert_parallel={engine.ep} needs a model with experts, but {path} is dense; "
            "set it to 1"
        )
    elif arch.moe and arch.moe.num_experts % engine.ep:
        found.append(
            f"rollout.engine.expert_parallel={engine.ep} does not divide the {arch.moe.num_experts} experts "
            f"of {path}; set it to a divisor of {arch.moe.num_experts}"
        )
    elif arch.moe and arch.moe.ffn_hidden_size % engine.moe_tp:
        found.append(
            f"rollout.engine.tensor_parallel={engine.tp} / expert_parallel={engine.ep} does not divide the "
            f"experts' intermediate size {arch.moe.ffn_hidden_size} of {path}; use fewer ranks"
        )
    return found


def _latent_engine(path: str, arch: Architecture) -> list[str]:
    """Return one sentence for each way in which SGLang misreads a latent-attention model's config.json.

    path: folder of the model.
    """
    config, found = read_object(Path(path) / "config.json"), []
    needed = {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "moe_layer_freq": 1}
    missing = [f'"{key}": {json_text(value)}' for key, value in needed.items() if key not in config]
    if missing:
        found.append(
            f"{path}/config.json lacks entries that SGLang needs and transformers does not write; add "
            f"{', '.join(missing)}"
        )
    if arch.norm_eps != LATENT_NORM_EPS:
        found.append(
            f"{path} cannot be used, because it has rms_norm_eps={arch.norm_eps:g}, which SGLang also uses "
            f"for the norms of latents, where the model's own code uses {LATENT_NORM_EPS:g}, so log-probs "
            "would differ"
        )
    return found


def _quantised_engine(path: str) -> list[str]:
    """Return [a sentence] if the checkpoint has FP8 weights, else []. SGLang would keep them in FP8.

    path: folder of the checkpoint.
    """
    try:
        if read_stored(Path(path)).block is None:
            return []
    except UserError:
        return []  # reported by the check of the weights
    return [
        f"{path} has FP8 weights (quantization_config), which SGLang would keep in FP8, although weight "
        "syncs bring others; make a copy without FP8 with tools/convert_hf_to_megatron.py and "
        "tools/convert_megatron_to_hf.py"
    ]


def _weights(path: str, arch: Architecture) -> list[str]:
    """Return one sentence for each error of a checkpoint's weights: missing tensors and wrong shapes.

    Only the headers of the weight files are read.

    path: HF folder of the model, the reference model or the reward model.
    arch: architecture as which the weights are loaded.
    """
    try:
        checkpoint = HFCheckpoint(path)
    except UserError as error:
        return [str(error)]
    least = arch.num_layers if arch.moe is None else sum(arch.moe.layers) * arch.moe.num_experts
    if least > len(checkpoint.names):  # checked first, because the weight map may be far too large
        return [
            f"{path}: the checkpoint is incomplete, because config.json requires at least {least} tensors, "
            f"but it has {len(checkpoint.names)}; copy the model again"
        ]
    return checkpoint.violations(weight_map(arch))
