"""Check that a run's models suit the configured parallel sizes, engines and lengths."""

from dataclasses import replace

from grpo_megatron.config.command import Command
from grpo_megatron.config.derived import scores_on_ranks
from grpo_megatron.config.schema import Config, Precision, Recompute, TransformerImpl
from grpo_megatron.errors import UserError
from grpo_megatron.model.adapters import without_adapter
from grpo_megatron.model.architecture import Architecture
from grpo_megatron.model.families import read_architecture, reward_architecture, weight_map
from grpo_megatron.model.parallel_sizes import ParallelSizes
from grpo_megatron.preflight.engine_fp8 import engine_fp8_violations
from grpo_megatron.preflight.engine_model import beam_violations, engine_violations
from grpo_megatron.preflight.fp8_sizes import fp8_violations
from grpo_megatron.preflight.layout import SIZES_OF_MODEL
from grpo_megatron.weights.hf_checkpoint import HFCheckpoint


def check_model(config: Config, command: Command = Command.train) -> Architecture:
    """Check that the run's models suit the configuration. Return the architecture of the model in model.path.

    A run calls this before it starts any process.

    command: the command that will run.

    Raises UserError with all violations that were found, or if the model's config.json cannot be read.
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
    """Return one sentence for each reason why the run's models cannot be used with this configuration.

    - The config.json and the weights of the model in model.path are checked.
    - For `train` and `serve`, the weights of the reference model in ref.path are checked, if it is set. For
      `train`, the reward model is checked, if there is one.

    Of weight files, only the headers are read.

    arch: architecture of the model in model.path.
    command: the command that will run. Checks that do not concern it are skipped, such as checks of engines
        for `sft`.
    """
    found = architecture_violations(config, arch, command)
    if command == Command.reward_model:
        try:
            reward_architecture(arch)
        except UserError as error:
            found.append(f"{config.model.path}: {error}")
        return found + _weights(config.model.path, arch)
    reference = config.ref.path if command.syncs else None
    for path in dict.fromkeys([config.model.path, reference or config.model.path]):
        found += _weights(path, arch)
    return found + (reward_model_violations(config, weights=True) if command == Command.train else [])


def reward_model_violations(config: Config, weights: bool = False) -> list[str]:
    """Return one sentence for each reason why the reward model cannot run on the trainer's ranks.

    The reward model must suit the parallel sizes that are configured for the trained model. The list is empty
    if the run has no reward model.

    weights: if True, check the headers of the reward model's weights, in addition to its config.json.
    """
    path = config.reward.model.path
    if not scores_on_ranks(config) or not path:
        return []
    try:
        arch = read_architecture(path)
    except UserError as error:
        return [f"reward.model.path: {error}"]
    if arch.delta is not None:
        return [
            f"reward.model.path: {path} has gated delta networks, which reward models on the trainer's ranks "
            "cannot have; choose another reward model"
        ]
    if arch.needs_local_layers and config.megatron.transformer_impl != TransformerImpl.local:
        return [
            f"reward.model.path: {path} needs Megatron's local layers, and a reward model on the trainer's "
            "ranks has the same kind of layers as the policy; set megatron.transformer_impl=local"
        ]
    if not arch.scalar_head:
        return [
            f"reward.model.path: {path} is a language model, not a reward model; train a reward model from "
            "it with `grpo-megatron reward-model`"
        ]
    sizes = replace(ParallelSizes.from_config(config.megatron), pipeline_layers=None)
    unfit = SIZES_OF_MODEL.violations(sizes, arch)
    found = [
        f"reward.model.path={path} does not fit the parallel sizes in megatron.*: {rule}" for rule in unfit
    ]
    return found + _weights(path, arch) if weights else found


def architecture_violations(
    config: Config, arch: Architecture, command: Command = Command.train
) -> list[str]:
    """Return one sentence for each reason why the model cannot run, found without reading its weights.

    `model_violations` includes these sentences. The planner calls this function instead, because it plans for
    folders that may contain no weights.

    arch: architecture of the model in model.path, which was read from config.json.
    command: the command that will run.
    """
    found = []
    if arch.scalar_head and command != Command.reward_model:
        found.append(
            f"{config.model.path} is a reward model, which has no output projection, so `{command}` cannot "
            "use it; set model.path to a language model"
        )
    if command == Command.eval:
        return found + engine_violations(config, arch) + _longest(config, arch, command)
    found += SIZES_OF_MODEL.violations(ParallelSizes.from_config(config.megatron), arch)
    if command.syncs and not config.rollout.replay:
        found += engine_violations(config, arch) + beam_violations(config, arch)
        if not found:  # otherwise an uneven split would be reported again, as cut blocks
            found += engine_fp8_violations(config, arch)
    found += fp8_violations(config, arch) + _local_layers(config, arch)
    if config.megatron.lora.rank > 0:
        found += without_adapter(arch, config.megatron.lora)
    return found + _longest(config, arch, command)


def _local_layers(config: Config, arch: Architecture) -> list[str]:
    """Return one sentence for each setting with which a model that needs local layers cannot be trained.

    The rules about parallel sizes, engines and adapters, which refuse further settings, are not included.
    """
    megatron, found = config.megatron, []
    if not arch.needs_local_layers:
        return []
    part = "attention with sinks" if arch.sinks else "norms of the outputs of attention and MLP"
    has = f"{config.model.path} has {'gated delta networks' if arch.delta else part}"
    if megatron.transformer_impl == TransformerImpl.transformer_engine:
        found.append(
            f"megatron.transformer_impl=transformer_engine: {has}, which only local layers compute; set "
            "megatron.transformer_impl=auto or megatron.transformer_impl=local"
        )
    if megatron.precision == Precision.fp8:
        found.append(
            f"megatron.precision=fp8: {has}, which needs local layers, and these cannot compute in FP8; set "
            "megatron.precision=bf16"
        )
    if megatron.recompute == Recompute.selective and "moe_act" in megatron.recompute_modules:
        found.append(
            f"megatron.recompute_modules=[moe_act]: {has}, which needs local layers, and these recompute "
            "whole experts; set megatron.recompute_modules=[moe]"
        )
    return found


def _longest(config: Config, arch: Architecture, command: Command) -> list[str]:
    """Return one sentence for each configured maximum length that exceeds what the model supports.

    A length is data.max_prompt_length plus the maximum length of a response, which can be different for
    training and for evaluation.
    """
    lengths = {"rollout.max_response_length": config.rollout.max_response_length}
    evaluated = {"eval.max_response_length": config.eval.max_response_length}
    if config.eval.max_response_length and command == Command.eval:
        lengths = evaluated
    elif config.eval.max_response_length and command == Command.train and config.data.eval:
        lengths |= evaluated
    longest, limit = arch.max_positions, ""
    computes_windows = not command.generates and config.megatron.transformer_impl == TransformerImpl.local
    if arch.longest_within_windows < longest and not computes_windows:
        longest, limit = arch.longest_within_windows, " within its sliding window, which SGLang ignores"
        if not command.generates:
            limit = " within its sliding window, which only megatron.transformer_impl=local computes"
    return [
        f"data.max_prompt_length + {key} = {config.data.max_prompt_length + length}, but "
        f"{config.model.path} supports only {longest} positions{limit}; lower one of the two"
        for key, length in lengths.items()
        if config.data.max_prompt_length + length > longest
    ]


def _weights(path: str, arch: Architecture) -> list[str]:
    """Return one sentence for each error of a checkpoint's weights: missing tensors and wrong shapes.

    Only the headers of the weight files are read.

    path: Hugging Face folder of the model, the reference model or the reward model.
    arch: architecture that the weights will be loaded into.
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
