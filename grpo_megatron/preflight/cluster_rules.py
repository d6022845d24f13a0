"""Rules about the machines that will run a configuration. The check can be made on another machine."""

from collections.abc import Iterator

from grpo_megatron.capabilities import BLACKWELL, FP8_CAPABILITY, Capabilities
from grpo_megatron.cluster.bundles import bundles
from grpo_megatron.config.command import Command
from grpo_megatron.config.engine import KVCacheDtype, Quantization
from grpo_megatron.config.fp8 import FP8Recipe
from grpo_megatron.config.schema import Config, Placement, Precision, Recompute, TransformerImpl
from grpo_megatron.errors import UserError
from grpo_megatron.model.parallel_sizes import ParallelSizes
from grpo_megatron.preflight.rule import ENGINE_COMMANDS, RuleBook

# Each check takes a Config and the Capabilities of the machines that will run it.
CLUSTER = RuleBook()

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
    """Return True if the configuration is for this machine: the section `cluster` names no other machines."""
    cluster = config.cluster
    return (cluster.ray_address, cluster.gpu, cluster.nodes, cluster.gpus_per_node) == (
        None,
        None,
        None,
        None,
    )


def known_capabilities(config: Config) -> Capabilities:
    """Return the capabilities of the run's machines, as far as they are known without asking a Ray cluster.

    If the run is for this machine, it is examined. Otherwise cluster.gpu, cluster.nodes and
    cluster.gpus_per_node tell what is known.
    """
    cluster = config.cluster
    facts = (cluster.gpu, cluster.nodes, cluster.gpus_per_node)
    known = Capabilities.of_this_machine() if runs_here(config) else Capabilities.of_facts(*facts)
    return known.emulating(config.megatron.emulate_kernels)


@CLUSTER.rule("Without GPUs there are none on a node either.", "cluster.gpus_per_node", "cluster.gpu")
def gpus_per_node_means_something(config: Config, capabilities: Capabilities) -> Iterator[str]:
    if config.cluster.gpu == "none" and config.cluster.gpus_per_node is not None:
        yield f"cluster.gpus_per_node={config.cluster.gpus_per_node} means nothing with cluster.gpu=none"


@CLUSTER.rule(
    "FP8 training needs TransformerEngine and a GPU with FP8 matrix products.",
    "megatron.precision",
    "cluster.gpu",
)
def fp8_can_run(config: Config, capabilities: Capabilities) -> Iterator[str]:
    if config.megatron.precision == Precision.fp8 and capabilities.fp8_problem:
        yield (
            f"megatron.precision=fp8 is not possible {capabilities.where}: {capabilities.fp8_problem}; use "
            "bf16"
        )


@CLUSTER.rule(
    "TransformerEngine's layers need TransformerEngine and GPUs.", "megatron.transformer_impl", "cluster.gpu"
)
def transformer_engine_can_run(config: Config, capabilities: Capabilities) -> Iterator[str]:
    problem = capabilities.transformer_engine_problem
    if config.megatron.transformer_impl == TransformerImpl.transformer_engine and problem:
        yield (
            f"megatron.transformer_impl=transformer_engine is not possible {capabilities.where}: {problem}; "
            "use local or auto"
        )


@CLUSTER.rule(
    "Kernels are emulated where there is no GPU that has them.", "megatron.emulate_kernels", "cluster.gpu"
)
def emulation_is_possible(config: Config, capabilities: Capabilities) -> Iterator[str]:
    if config.megatron.emulate_kernels and capabilities.transformer_engine_problem:
        yield (
            f"megatron.emulate_kernels=true is not possible {capabilities.where}: "
            f"{capabilities.transformer_engine_problem}"
        )


@CLUSTER.rule("MXFP8 needs a Blackwell GPU.", "megatron.fp8.recipe", "megatron.precision", "cluster.gpu")
def mxfp8_has_its_gpu(config: Config, capabilities: Capabilities) -> Iterator[str]:
    megatron, gpu = config.megatron, capabilities.gpu
    wanted = megatron.precision == Precision.fp8 and megatron.fp8.recipe == FP8Recipe.mxfp8
    if wanted and gpu and gpu.compute_capability < BLACKWELL:
        major, minor = gpu.compute_capability
        yield (
            "megatron.fp8.recipe=mxfp8 needs compute capability 10.0 (Blackwell), the GPU "
            f"{capabilities.where} has {major}.{minor}; choose blockwise"
        )


@CLUSTER.rule(
    "Activations of experts alone are recomputed by the layers that have all experts in one module, "
    "TransformerEngine's.",
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
        yield (
            "megatron.recompute_modules=[moe_act] needs the TransformerEngine layers, and these are the "
            f"local ones (megatron.transformer_impl={megatron.transformer_impl.value}); recompute moe "
            "instead"
        )


@CLUSTER.rule(
    "Ranks and engines have a GPU each; colocated engines share those of the ranks.",
    *_RANKS,
    *_ENGINES,
    *_FACTS,
    commands=("train",),
)
def ranks_and_engines_fit(config: Config, capabilities: Capabilities) -> Iterator[str]:
    (ranks, engines), have = num_processes(config, Command.train), capabilities.num_gpus
    engine_gpus = engines * config.rollout.engine.tensor_parallel
    colocated = config.cluster.placement == Placement.colocated
    needed = max(ranks, engine_gpus) if colocated else ranks + engine_gpus
    if have is not None and needed > have:
        yield (
            f"cluster.placement={config.cluster.placement.value} of {ranks} trainer ranks "
            f"(megatron.*_parallel) and {engines} engines of "
            f"rollout.engine.tensor_parallel={config.rollout.engine.tensor_parallel} needs {needed} GPUs; "
            f"{capabilities.where} there are {have}"
        )


@CLUSTER.rule("Ranks have a GPU each.", *_RANKS, *_FACTS, commands=("sft", "reward-model"))
def ranks_fit(config: Config, capabilities: Capabilities) -> Iterator[str]:
    ranks, have = _num_ranks(config), capabilities.num_gpus
    if have is not None and ranks > have:
        yield (
            f"{ranks} trainer ranks, the product of {', '.join(_RANKS)}, need as many GPUs; "
            f"{capabilities.where} there are {have}"
        )


@CLUSTER.rule(
    "Engines have GPUs of their own, each on one node or on several whole ones.",
    "rollout.engine.num_engines",
    "rollout.engine.tensor_parallel",
    *_FACTS,
    commands=("eval",),
)
def engines_alone_fit(config: Config, capabilities: Capabilities) -> Iterator[str]:
    engines, tp, have = (
        config.rollout.engine.num_engines,
        config.rollout.engine.tensor_parallel,
        capabilities.num_gpus,
    )
    per_node = capabilities.gpus_per_node or tp
    if tp > per_node and tp % per_node:
        yield (
            f"rollout.engine.tensor_parallel={tp}: an engine over several nodes takes all GPUs of each, and "
            f"{capabilities.where} each has {per_node}"
        )
    if have is not None and engines * tp > have:
        yield (
            f"rollout.engine.num_engines={engines} of rollout.engine.tensor_parallel={tp} need "
            f"{engines * tp} GPUs; {capabilities.where} there are {have}"
        )


@CLUSTER.rule(
    "The ranks of a tensor-parallel group are on one node, since they exchange activations in every layer.",
    *_RANKS,
    *_FACTS,
)
def tensor_parallel_is_within_a_node(config: Config, capabilities: Capabilities) -> Iterator[str]:
    tp, per_node = config.megatron.tensor_parallel, capabilities.gpus_per_node
    if per_node and _crosses_a_node(0, _num_ranks(config), tp, per_node):
        yield (
            f"megatron.tensor_parallel={tp} groups would cross nodes: {capabilities.where} each has "
            f"{per_node} GPUs"
        )


@CLUSTER.rule(
    "An engine is on one node, or on several whole ones.", *_ENGINES, *_RANKS, *_FACTS, commands=("train",)
)
def engines_fit_nodes(config: Config, capabilities: Capabilities) -> Iterator[str]:
    per_node, colocated = capabilities.gpus_per_node, config.cluster.placement == Placement.colocated
    if per_node and not config.rollout.replay:
        group, engine_tp = config.megatron.tensor_parallel, config.rollout.engine.tensor_parallel
        ranks, engines = num_processes(config, Command.train)
        try:
            # Another rule reports groups that are larger than a node.
            bundles(ranks, min(group, per_node), engines, engine_tp, per_node, colocated)
        except UserError as error:
            yield f"{capabilities.where}: {error}"


@CLUSTER.rule(
    "Keys and values are kept in FP8 on GPUs only.",
    "rollout.engine.kv_cache_dtype",
    "cluster.gpu",
    commands=ENGINE_COMMANDS,
)
def kv_cache_in_fp8_has_gpus(config: Config, capabilities: Capabilities) -> Iterator[str]:
    dtype = config.rollout.engine.kv_cache_dtype
    if dtype != KVCacheDtype.auto and capabilities.gpus is False:
        yield (
            f"rollout.engine.kv_cache_dtype={dtype.value} needs GPUs: SGLang writes such a cache by their "
            "kernels; use auto"
        )


@CLUSTER.rule(
    "Attention is data-parallel on GPUs only.",
    "rollout.engine.data_parallel_attention",
    "cluster.gpu",
    commands=ENGINE_COMMANDS,
)
def data_parallel_attention_has_gpus(config: Config, capabilities: Capabilities) -> Iterator[str]:
    groups = config.rollout.engine.data_parallel_attention
    if groups > 1 and capabilities.gpus is False:
        yield (
            f"rollout.engine.data_parallel_attention={groups} needs GPUs: SGLang gathers the groups' tokens "
            "through pinned memory and Triton kernels; use 1"
        )


@CLUSTER.rule(
    "Engines are in FP8 on Ada and Hopper, where SGLang computes with the weights as they are synced.",
    "rollout.engine.quantization",
    "cluster.gpu",
    commands=("train",),
)
def engines_compute_in_fp8(config: Config, capabilities: Capabilities) -> Iterator[str]:
    gpu = capabilities.gpu
    wanted = config.rollout.engine.quantization == Quantization.fp8
    if wanted and gpu and not FP8_CAPABILITY <= gpu.compute_capability < BLACKWELL:
        major, minor = gpu.compute_capability
        yield (
            "rollout.engine.quantization=fp8 needs compute capability 8.9 (Ada) or 9.0 (Hopper), the GPU "
            f"{capabilities.where} has {major}.{minor}, for which SGLang would rearrange the weights as it "
            "starts, and never again; set it to none"
        )


def _num_ranks(config: Config) -> int:
    return ParallelSizes.from_config(config.megatron).world_size


def num_processes(config: Config, command: Command) -> tuple[int, int]:
    """Return (number of trainer ranks, number of engines) that a command starts."""
    generates = command.generates and not (command == Command.train and config.rollout.replay)
    return (
        _num_ranks(config) if command.trains else 0,
        config.rollout.engine.num_engines if generates else 0,
    )


def _crosses_a_node(first: int, end: int, size: int, per_node: int) -> bool:
    """Return True if some group of `size` neighbouring GPUs is on more than one node.

    The GPUs `first` to `end - 1` are divided into such groups, and each node has `per_node` GPUs.
    """
    return any(start // per_node != (start + size - 1) // per_node for start in range(first, end, size))
