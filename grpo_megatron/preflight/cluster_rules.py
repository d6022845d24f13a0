"""Rules about the machines that will run a configuration.

The rules read a description of the machines (Capabilities), so they can be checked on any other machine.
"""

from collections.abc import Iterator

from grpo_megatron.capabilities import BLACKWELL, FP8_CAPABILITY, Capabilities
from grpo_megatron.cluster.bundles import bundles
from grpo_megatron.config.command import Command
from grpo_megatron.config.engine import KVCacheDtype, Quantization
from grpo_megatron.config.fp8 import FP8Recipe
from grpo_megatron.config.schema import Config, Placement, Precision, Recompute, TransformerImpl
from grpo_megatron.errors import UserError
from grpo_megatron.model.parallel_sizes import ParallelSizes
from grpo_megatron.preflight.rule import (
    ENGINE_COMMANDS,
    SYNC_COMMANDS,
    TRAINING_COMMANDS,
    RuleBook,
    excludes,
    shown,
)

_FACTS = ("cluster.gpu", "cluster.nodes", "cluster.gpus_per_node")
_ENGINES = (
    "rollout.engine.num_engines",
    "rollout.engine.tensor_parallel",
    "rollout.replay",
    "cluster.placement",
)
_RANKS = (
    "megatron.tensor_parallel",
    "megatron.pipeline_parallel",
    "megatron.data_parallel",
    "megatron.context_parallel",
)


def runs_here(config: Config) -> bool:
    """Return True if the run is for this machine, because the configuration describes no other machines.

    cluster.ray_address, cluster.gpu, cluster.nodes and cluster.gpus_per_node are all unset in this case.
    """
    cluster = config.cluster
    return (cluster.ray_address, cluster.gpu, cluster.nodes, cluster.gpus_per_node) == (
        None,
        None,
        None,
        None,
    )


def known_capabilities(config: Config) -> Capabilities:
    """Return what is known about the run's machines without asking a Ray cluster.

    If the configuration describes no other machines, the run is for this machine, which is examined.
    Otherwise the capabilities follow from cluster.gpu, cluster.nodes and cluster.gpus_per_node. A capability
    that does not follow from these settings is None.
    """
    cluster = config.cluster
    facts = (cluster.gpu, cluster.nodes, cluster.gpus_per_node)
    known = Capabilities.of_this_machine() if runs_here(config) else Capabilities.of_facts(*facts)
    return known.emulating(config.megatron.emulate_kernels)


# Each check takes a Config and the Capabilities of the machines that will run it.
CLUSTER = RuleBook(
    excludes("cluster.gpu=none", "cluster.gpus_per_node", commands=TRAINING_COMMANDS),
)


@CLUSTER.rule(
    "megatron.precision=fp8 needs TransformerEngine and GPUs that support FP8; otherwise set "
    "megatron.precision=bf16.",
    "megatron.precision",
    "cluster.gpu",
)
def fp8_can_run(config: Config, capabilities: Capabilities) -> Iterator[str]:
    if config.megatron.precision == Precision.fp8 and capabilities.fp8_problem:
        yield f"{capabilities.where}: {capabilities.fp8_problem}"


@CLUSTER.rule(
    "megatron.transformer_impl=transformer_engine needs TransformerEngine and GPUs; otherwise set "
    "megatron.transformer_impl=auto.",
    "megatron.transformer_impl",
    "cluster.gpu",
)
def transformer_engine_can_run(config: Config, capabilities: Capabilities) -> Iterator[str]:
    problem = capabilities.transformer_engine_problem
    if config.megatron.transformer_impl == TransformerImpl.transformer_engine and problem:
        yield f"{capabilities.where}: {problem}"


@CLUSTER.rule(
    "megatron.emulate_kernels=true works only on machines without a GPU.",
    "megatron.emulate_kernels",
    "cluster.gpu",
)
def emulation_is_possible(config: Config, capabilities: Capabilities) -> Iterator[str]:
    if config.megatron.emulate_kernels and capabilities.transformer_engine_problem:
        yield f"{capabilities.where}: {capabilities.transformer_engine_problem}"


@CLUSTER.rule(
    "megatron.fp8.recipe=mxfp8 needs GPUs of compute capability 10.0 (Blackwell); otherwise set "
    "megatron.fp8.recipe=blockwise.",
    "megatron.fp8.recipe",
    "megatron.precision",
    "cluster.gpu",
)
def mxfp8_has_its_gpu(config: Config, capabilities: Capabilities) -> Iterator[str]:
    megatron, gpu = config.megatron, capabilities.gpu
    wanted = megatron.precision == Precision.fp8 and megatron.fp8.recipe == FP8Recipe.mxfp8
    if wanted and gpu and gpu.compute_capability < BLACKWELL:
        yield _compute_capability(capabilities)


@CLUSTER.rule(
    "megatron.recompute_modules=[moe_act] needs TransformerEngine's layers, which have all experts in one "
    "module; with the local layers, set megatron.recompute_modules=[moe].",
    "megatron.recompute_modules",
    "megatron.recompute",
    "megatron.transformer_impl",
    "megatron.precision",
    "megatron.lora.rank",
    "cluster.gpu",
)
def experts_activations_have_their_layers(config: Config, capabilities: Capabilities) -> Iterator[str]:
    megatron = config.megatron
    if megatron.recompute != Recompute.selective or "moe_act" not in megatron.recompute_modules:
        return
    impossible = (
        megatron.precision == Precision.fp32 or megatron.lora.rank or capabilities.transformer_engine_problem
    )
    if megatron.transformer_impl == TransformerImpl.local or (
        megatron.transformer_impl == TransformerImpl.auto and impossible
    ):
        yield shown(config, "megatron.transformer_impl")


@CLUSTER.rule(
    "megatron.recompute_modules=[layernorm] needs TransformerEngine to be installed, because Megatron's "
    "recomputation of norms calls it whatever the layers are; use [mlp] or megatron.recompute=full.",
    "megatron.recompute_modules",
    "megatron.recompute",
    "cluster.gpu",
)
def recomputed_norms_have_transformer_engine(config: Config, capabilities: Capabilities) -> Iterator[str]:
    megatron, problem = config.megatron, capabilities.transformer_engine_problem
    if problem and megatron.recompute == Recompute.selective and "layernorm" in megatron.recompute_modules:
        yield f"{capabilities.where}: {problem}"


@CLUSTER.rule(
    "Each trainer rank (megatron.*_parallel) and each engine rank needs a GPU; with "
    "cluster.placement=colocated they share GPUs.",
    *_RANKS,
    *_ENGINES,
    *_FACTS,
    commands=SYNC_COMMANDS,
)
def ranks_and_engines_fit(config: Config, capabilities: Capabilities) -> Iterator[str]:
    (ranks, engines), have = num_processes(config, Command.train), capabilities.num_gpus
    engine_gpus = engines * config.rollout.engine.tensor_parallel
    colocated = config.cluster.placement == Placement.colocated
    needed = max(ranks, engine_gpus) if colocated else ranks + engine_gpus
    if have is not None and needed > have:
        yield (
            f"{ranks} trainer ranks and {engines} engines with "
            f"{shown(config, 'rollout.engine.tensor_parallel')} need {needed} GPUs with "
            f"{shown(config, 'cluster.placement')}, but there are only {have} {capabilities.where}"
        )


@CLUSTER.rule(
    f"Each trainer rank needs a GPU; the number of ranks is the product of {', '.join(_RANKS)}.",
    *_RANKS,
    *_FACTS,
    commands=("sft", "reward-model"),
)
def ranks_fit(config: Config, capabilities: Capabilities) -> Iterator[str]:
    ranks, have = _num_ranks(config), capabilities.num_gpus
    if have is not None and ranks > have:
        yield f"{ranks} ranks, but only {have} GPUs {capabilities.where}"


@CLUSTER.rule(
    "Each of the rollout.engine.num_engines engines needs rollout.engine.tensor_parallel GPUs, on one node "
    "or on several whole nodes.",
    "rollout.engine.num_engines",
    "rollout.engine.tensor_parallel",
    *_FACTS,
    commands=("eval",),
)
def engines_alone_fit(config: Config, capabilities: Capabilities) -> Iterator[str]:
    engines, tp = config.rollout.engine.num_engines, config.rollout.engine.tensor_parallel
    per_node, have = capabilities.gpus_per_node or tp, capabilities.num_gpus
    if tp > per_node and tp % per_node:
        yield (
            f"{shown(config, 'rollout.engine.tensor_parallel')}, but each node has {per_node} GPUs "
            f"{capabilities.where}"
        )
    if have is not None and engines * tp > have:
        yield f"{engines * tp} GPUs are needed, but there are only {have} {capabilities.where}"


@CLUSTER.rule(
    "The ranks of a megatron.tensor_parallel group must be on one node, because they exchange activations "
    "in every layer.",
    *_RANKS,
    *_FACTS,
)
def tensor_parallel_is_within_a_node(config: Config, capabilities: Capabilities) -> Iterator[str]:
    tp, per_node = config.megatron.tensor_parallel, capabilities.gpus_per_node
    groups = range(0, _num_ranks(config), tp)  # the first rank of each; ranks are numbered node by node
    if per_node and any(first // per_node != (first + tp - 1) // per_node for first in groups):
        yield (
            f"groups of {tp} ranks, but each node has {per_node} GPUs {capabilities.where}; set "
            f"megatron.tensor_parallel to a divisor of {per_node}"
        )


@CLUSTER.rule(
    "An engine of rollout.engine.tensor_parallel ranks must be on one node, or on several whole nodes.",
    *_ENGINES,
    *_RANKS,
    *_FACTS,
    commands=SYNC_COMMANDS,
)
def engines_fit_nodes(config: Config, capabilities: Capabilities) -> Iterator[str]:
    per_node, colocated = capabilities.gpus_per_node, config.cluster.placement == Placement.colocated
    if per_node and not config.rollout.replay:
        group, engine_tp = config.megatron.tensor_parallel, config.rollout.engine.tensor_parallel
        ranks, engines = num_processes(config, Command.train)
        try:
            # `min`, because another rule reports tensor-parallel groups that are larger than a node.
            bundles(ranks, min(group, per_node), engines, engine_tp, per_node, colocated)
        except UserError as error:
            yield f"{capabilities.where}: {error}"


@CLUSTER.rule(
    "rollout.engine.kv_cache_dtype must be auto on machines without GPUs, because SGLang writes an FP8 "
    "cache with GPU kernels.",
    "rollout.engine.kv_cache_dtype",
    "cluster.gpu",
    commands=ENGINE_COMMANDS,
)
def kv_cache_in_fp8_has_gpus(config: Config, capabilities: Capabilities) -> Iterator[str]:
    if config.rollout.engine.kv_cache_dtype != KVCacheDtype.auto and capabilities.gpus is False:
        yield shown(config, "rollout.engine.kv_cache_dtype")


@CLUSTER.rule(
    "rollout.engine.data_parallel_attention must be 1 on machines without GPUs, because SGLang gathers the "
    "groups' tokens with pinned memory and Triton kernels.",
    "rollout.engine.data_parallel_attention",
    "cluster.gpu",
    commands=ENGINE_COMMANDS,
)
def data_parallel_attention_has_gpus(config: Config, capabilities: Capabilities) -> Iterator[str]:
    if config.rollout.engine.data_parallel_attention > 1 and capabilities.gpus is False:
        yield shown(config, "rollout.engine.data_parallel_attention")


@CLUSTER.rule(
    "rollout.engine.quantization=fp8 needs GPUs of compute capability 8.9 (Ada) or 9.0 (Hopper), because "
    "on other GPUs SGLang rearranges the weights only once, when it starts; otherwise set "
    "rollout.engine.quantization=none.",
    "rollout.engine.quantization",
    "cluster.gpu",
    commands=SYNC_COMMANDS,
)
def engines_compute_in_fp8(config: Config, capabilities: Capabilities) -> Iterator[str]:
    gpu = capabilities.gpu
    wanted = config.rollout.engine.quantization == Quantization.fp8
    if wanted and gpu and not FP8_CAPABILITY <= gpu.compute_capability < BLACKWELL:
        yield _compute_capability(capabilities)


def _compute_capability(capabilities: Capabilities) -> str:
    major, minor = capabilities.gpu.compute_capability
    return f"the GPUs {capabilities.where} have {major}.{minor}"


def _num_ranks(config: Config) -> int:
    return ParallelSizes.from_config(config.megatron).world_size


def num_processes(config: Config, command: Command) -> tuple[int, int]:
    """Return (number of trainer ranks, number of engines) that a run of a command starts.

    `train` starts no engines if it replays recorded samples (rollout.replay).
    """
    generates = command.generates and not (command == Command.train and config.rollout.replay)
    return (
        _num_ranks(config) if command.trains else 0,
        config.rollout.engine.num_engines if generates else 0,
    )
