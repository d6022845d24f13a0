"""Layouts of a model on a cluster: the quickest that are legal and fit, and the least that must change of one that does not.

What is legal is what the rules of preflight say.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, product

from grpo_megatron.batch.layout import padded_to
from grpo_megatron.capabilities import GPUS
from grpo_megatron.config.schema import Config, Placement, Recompute
from grpo_megatron.model.architecture import Architecture
from grpo_megatron.model.parallel_sizes import ParallelSizes
from grpo_megatron.planner.engines import kv_tokens
from grpo_megatron.planner.memory import takes_turns
from grpo_megatron.planner.plan import Plan, plan
from grpo_megatron.planner.reward_model import scorer
from grpo_megatron.planner.states import training_states
from grpo_megatron.planner.time import Lengths, times
from grpo_megatron.preflight.layout import layout_violations, layout_violations_of_model
from grpo_megatron.preflight.model import architecture_violations, reward_model_violations
from grpo_megatron.preflight.rules import violations

# The longest pipeline that is tried.
_MOST_STAGES = 32


def search(config: Config, arch: Architecture, lengths: Lengths, count: int = 5) -> list[Plan]:
    """The quickest plans on the configured cluster, at most one for each layout of the trainer; without weight syncs.

    Batches, lengths, algorithm and precision stay as configured, and a micro-batch has as many tokens over all context-parallel ranks.
    Layouts are tried by the time that they would take with nothing recomputed and nothing offloaded, which is the least that they can
    take, until no further one can be quicker than those that were found.
    """
    bounds = [
        (_step_seconds(each, arch, lengths), number, each)
        for number, each in enumerate(_candidates(config, arch))
    ]
    found: dict[tuple, Plan] = {}
    for bound, _, candidate in sorted(bounds):
        if len(found) >= count and bound >= sorted(each.times.step for each in found.values())[count - 1]:
            break
        key = (candidate.cluster.placement, ParallelSizes.from_config(candidate.megatron))
        best = _quickest(candidate, arch, lengths)
        if best and (key not in found or best.times.step < found[key].times.step):
            found[key] = best
    return sorted(found.values(), key=lambda each: each.times.step)[:count]


def _quickest(candidate: Config, arch: Architecture, lengths: Lengths) -> Plan | None:
    """Of what can be computed again or offloaded with this layout."""
    variants = list(_variants(candidate, arch))
    if not plan(variants[-1], arch, lengths, with_sync=False).fits:
        return None  # the last of them takes least
    plans = [plan(each, arch, lengths, with_sync=False) for each in variants]
    fitting = sorted((each for each in plans if each.fits), key=lambda each: each.times.step)
    return next((each for each in fitting if not broken_rules(each.config, arch)), None)


def least_changes(config: Config, arch: Architecture) -> Plan | None:
    """The configuration with the fewest changes, in the order in which they cost least, with which it fits; its layout stays."""
    changes = list(_changes(config, arch))
    for size in range(1, 5):
        for chosen in combinations(changes, size):
            for options in product(*chosen):
                changed = config
                for section, values in options:
                    changed = with_values(changed, section, **values)
                found = plan(changed, arch, with_sync=False)
                if found.fits and not broken_rules(changed, arch):
                    return found
    return None


def with_values(config: Config, section: str, **values) -> Config:
    """section: of the configuration, such as `megatron`, or `rollout.engine`."""
    head, _, rest = section.partition(".")
    inner = getattr(config, head)
    return replace(config, **{head: with_values(inner, rest, **values) if rest else replace(inner, **values)})


def broken_rules(config: Config, arch: Architecture) -> list[str]:
    """One sentence for each."""
    return list(
        dict.fromkeys(
            violations(config) + architecture_violations(config, arch) + reward_model_violations(config)
        )
    )


def broken_in_any_layout(config: Config, arch: Architecture) -> list[str]:
    """Those that would be broken with one rank and one engine, too."""
    one = {"num_engines": 1, "tensor_parallel": 1, "expert_parallel": 1, "data_parallel_attention": 1}
    alone = with_values(
        with_values(config, "rollout.engine", **one), "cluster", placement=Placement.colocated
    )
    return broken_rules(_with_layout(alone, ParallelSizes()), arch)


def _step_seconds(config: Config, arch: Architecture, lengths: Lengths) -> float:
    pool = int(config.rollout.engine.mem_fraction * GPUS[config.cluster.gpu].memory)
    tokens = kv_tokens(arch, config.rollout.engine, pool)
    return times(config, arch, training_states(arch, config.megatron), tokens, lengths).step


def _doublings(most: int) -> list[int]:
    return [1 << power for power in range(most.bit_length())]


def _candidates(config: Config, arch: Architecture) -> Iterator[Config]:
    """Of every placement, engine and layout of the trainer that uses the whole cluster; the rules of layouts hold.

    Engines hold at least one sequence of full length.
    """
    longest = config.data.max_prompt_length + config.rollout.max_response_length
    for placement, trainer_gpus, engine_gpus in _placements(config):
        layouts = list(_layouts(config, arch, trainer_gpus))
        for tp in _doublings(engine_gpus):
            if engine_gpus % tp:
                continue
            engine = config.rollout.engine
            ep = engine.expert_parallel if tp % engine.expert_parallel == 0 else 1
            groups = engine.data_parallel_attention if tp % engine.data_parallel_attention == 0 else 1
            sizes = {"tensor_parallel": tp, "expert_parallel": ep, "data_parallel_attention": groups}
            based = with_values(config, "rollout.engine", num_engines=engine_gpus // tp, **sizes)
            based = with_values(based, "cluster", placement=placement)
            if architecture_violations(with_values(based, "megatron", **_ONE_RANK), arch):
                continue
            if (
                kv_tokens(
                    arch, based.rollout.engine, int(engine.mem_fraction * GPUS[config.cluster.gpu].memory)
                )
                < longest
            ):
                continue
            for layout in layouts:
                yield _with_layout(based, layout)


# With which only an engine's sizes can be against a model.
_ONE_RANK = {
    "tensor_parallel": 1,
    "pipeline_parallel": 1,
    "virtual_pipeline": 1,
    "expert_parallel": 1,
    "expert_tensor_parallel": 1,
    "sequence_parallel": False,
    "pipeline_layers": [],
}


def _placements(config: Config) -> Iterator[tuple[Placement, int, int]]:
    """(placement, GPUs of the trainer, of the engines)"""
    nodes, per_node = config.cluster.nodes, config.cluster.gpus_per_node
    gpus = nodes * per_node
    yield Placement.colocated, gpus, gpus
    unit = per_node if nodes > 1 else 1
    shares = dict.fromkeys(gpus * quarter // 4 // unit * unit for quarter in (1, 2, 3))
    yield from ((Placement.separate, share, gpus - share) for share in shares if share)


def _layouts(config: Config, arch: Architecture, gpus: int) -> Iterator[ParallelSizes]:
    """Those that use all these GPUs, and that the rules of layouts allow, for a reward model too."""
    per_node, scoring = config.cluster.gpus_per_node, scorer(config)
    stages = _doublings(min(gpus, arch.num_layers, _MOST_STAGES))
    experts = _doublings(arch.moe.num_experts) if arch.moe else [1]
    for tp, pp, cp, ep, vpp in product(_doublings(per_node), stages, _doublings(per_node), experts, (1, 2)):
        dp = gpus // (tp * pp * cp)
        if dp * tp * pp * cp != gpus or pp * vpp > arch.num_layers:
            continue
        each, more = divmod(arch.num_layers, pp * vpp)
        layers = tuple(each + (chunk < more) for chunk in range(pp * vpp)) if more else None
        sizes = ParallelSizes(tp, pp, dp, cp, tp > 1, vpp, ep, pipeline_layers=layers)
        if layout_violations(sizes) or layout_violations_of_model(sizes, arch):
            continue
        if scoring and layout_violations_of_model(replace(sizes, pipeline_layers=None), scoring.arch):
            continue
        yield sizes


def _with_layout(config: Config, sizes: ParallelSizes) -> Config:
    """With the layout, the distributed optimizer, and nothing recomputed or offloaded; colocated ranks sleep."""
    config = with_values(
        config,
        "train",
        max_tokens_per_micro_batch=_micro_batch(config, sizes.cp),
        constant_length_packs=sizes.pp > 1,
    )
    return with_values(
        with_values(config, "optimizer", offload=False),
        "megatron",
        tensor_parallel=sizes.tp,
        sequence_parallel=sizes.sequence_parallel,
        pipeline_parallel=sizes.pp,
        virtual_pipeline=sizes.vpp,
        pipeline_layers=list(sizes.pipeline_layers or ()),
        context_parallel=sizes.cp,
        data_parallel=sizes.dp,
        expert_parallel=sizes.ep,
        expert_tensor_parallel=1,
        distributed_optimizer=True,
        recompute=Recompute.none,
        sleep=config.cluster.placement == Placement.colocated,
    )


def _micro_batch(config: Config, cp: int) -> int:
    """Tokens of a micro-batch on each of `cp` ranks: as many over all of them as now, and at least one sequence."""
    now, train = config.megatron.context_parallel, config.train
    if cp == now:
        return train.max_tokens_per_micro_batch
    longest = config.data.max_prompt_length + config.rollout.max_response_length
    tokens = max(train.max_tokens_per_micro_batch * now, longest)
    return padded_to(-(-tokens // cp), 256)  # what CP, SP and the blocks of FP8 pad to divides it


def _recomputations(arch: Architecture) -> list[dict]:
    """From nothing to whole layers; of parts, the largest that selective recomputation frees."""
    modules = ["layernorm"]
    modules += ["mlp"] if arch.moe is None or not all(arch.moe.layers) else []
    modules += ["moe"] if arch.moe else []
    selective = {"recompute": Recompute.selective, "recompute_modules": sorted(modules)}
    return [{"recompute": Recompute.none}, selective, {"recompute": Recompute.full}]


def _variants(config: Config, arch: Architecture) -> Iterator[Config]:
    """With more and more computed again, and the optimizer's states on the device or on the host."""
    for recompute, offload in product(_recomputations(arch), (False, True)):
        yield with_values(with_values(config, "megatron", **recompute), "optimizer", offload=offload)


def _changes(config: Config, arch: Architecture) -> Iterator[list[tuple[str, dict]]]:
    """What could be changed, each with its options (section, values), the cheapest first."""
    megatron, train = config.megatron, config.train
    if config.cluster.placement == Placement.colocated and not takes_turns(config):
        yield [("megatron", {"sleep": True})]
    if not megatron.distributed_optimizer and megatron.data_parallel * megatron.context_parallel > 1:
        yield [("megatron", {"distributed_optimizer": True})]
    if megatron.tensor_parallel > 1 and not megatron.sequence_parallel:
        yield [("megatron", {"sequence_parallel": True})]
    if config.algorithm.needs_reference and not config.ref.offload:
        yield [("ref", {"offload": True})]
    fractions = [twentieths / 20 for twentieths in range(18, 7, -1)]
    now = config.rollout.engine.mem_fraction
    yield [("rollout.engine", {"mem_fraction": fraction}) for fraction in fractions if fraction != now]
    if not config.optimizer.offload:
        yield [("optimizer", {"offload": True})]
    least = -(
        -(config.data.max_prompt_length + config.rollout.max_response_length) // megatron.context_parallel
    )
    if least < train.max_tokens_per_micro_batch:
        yield [("train", {"max_tokens_per_micro_batch": least})]
    order = [Recompute.none, Recompute.selective, Recompute.full]
    more = [
        each
        for each in _recomputations(arch)
        if order.index(each["recompute"]) > order.index(megatron.recompute)
    ]
    if more:
        yield [("megatron", values) for values in more]
