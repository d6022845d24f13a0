"""Search for parallel layouts of a model on a cluster, for `grpo-megatron plan --search` and for advice.

`search` finds the fastest layouts that break no rule and for which the GPUs have enough memory. If the memory
is too small for a given layout, `least_changes` finds the fewest changes that help.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, product

from grpo_megatron.batch.layout import padded_to
from grpo_megatron.capabilities import GPUS
from grpo_megatron.config.schema import Config, Placement, Recompute
from grpo_megatron.model.architecture import Architecture
from grpo_megatron.model.parallel_sizes import ParallelSizes
from grpo_megatron.planner.engines import EngineRoom, engine_room
from grpo_megatron.planner.lengths import Lengths
from grpo_megatron.planner.memory import takes_turns
from grpo_megatron.planner.plan import Plan, plan
from grpo_megatron.planner.reward_model import scorer
from grpo_megatron.planner.states import training_states
from grpo_megatron.planner.time import times
from grpo_megatron.preflight.layout import SIZES, SIZES_OF_MODEL
from grpo_megatron.preflight.model import architecture_violations, reward_model_violations
from grpo_megatron.preflight.rules import violations

# Longest pipeline that is tried, in stages.
_MOST_STAGES = 32


def search(config: Config, arch: Architecture, lengths: Lengths, count: int = 5) -> list[Plan]:
    """Search for the layouts that train fastest on the configured cluster. Return their plans, fastest first.

    The list has at most one plan for each placement and layout of the trainer. It is empty if no layout fits.
    Batches, lengths, algorithm and precision stay as configured. A micro-batch keeps its number of tokens,
    summed over all context-parallel ranks. The time of weight syncs is left out.

    Each candidate is first timed without recomputation and without an offloaded optimizer, which gives a
    lower bound of its time. Candidates are tried in the order of these bounds. The search ends when `count`
    plans have been found that are all faster than the bounds of the remaining candidates.

    arch: architecture of the model.
    lengths: mean lengths of prompts and responses.
    count: largest number of plans to return.
    """
    bounds = [
        (_step_seconds(each, arch, lengths), index, each)
        for index, each in enumerate(_candidates(config, arch))
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
    """Return the fastest plan with the candidate's layout, over all settings of recomputation and offloading.

    Plans that break a rule or need too much GPU memory do not count. Returns None if no other plan is left.
    """
    variants = list(_variants(candidate, arch))
    if not plan(variants[-1], arch, lengths, with_sync=False).fits:
        return None  # the last variant takes the least memory
    plans = [plan(each, arch, lengths, with_sync=False) for each in variants]
    fitting = sorted((each for each in plans if each.fits), key=lambda each: each.times.step)
    return next((each for each in fitting if not broken_rules(each.config, arch)), None)


def least_changes(config: Config, arch: Architecture) -> Plan | None:
    """Find the fewest changes to a configuration after which the GPUs' memory is enough. Return the new plan.

    The parallel layout stays the same, and the changed configuration breaks no rule. Among equally few
    changes, those that cost little time are preferred. Returns None if more than four changes would be
    needed.
    """
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
    """Return a copy of the configuration with new values in one section.

    section: dotted name, such as `megatron` or `rollout.engine`.
    values: {key of the section: new value}.
    """
    head, _, rest = section.partition(".")
    inner = getattr(config, head)
    return replace(config, **{head: with_values(inner, rest, **values) if rest else replace(inner, **values)})


def broken_rules(config: Config, arch: Architecture) -> list[str]:
    """Return one sentence for each rule that the configuration breaks; empty if it breaks none.

    Rules about the architectures of the model and of the reward model are included. Weights are not checked.

    arch: architecture of the model.
    """
    return list(
        dict.fromkeys(
            violations(config) + architecture_violations(config, arch) + reward_model_violations(config)
        )
    )


def broken_in_any_layout(config: Config, arch: Architecture) -> list[str]:
    """Return one sentence for each rule that the configuration breaks whatever its parallel layout is.

    To find these rules, the configuration is checked with a layout of one trainer rank and one engine of one
    rank.
    """
    one = {"num_engines": 1, "tensor_parallel": 1, "expert_parallel": 1, "data_parallel_attention": 1}
    # A rule forbids colocated placement with staleness, whatever the layout.
    placement = Placement.separate if config.rollout.staleness else Placement.colocated
    alone = with_values(with_values(config, "rollout.engine", **one), "cluster", placement=placement)
    return broken_rules(_with_layout(alone, ParallelSizes()), arch)


def _step_seconds(config: Config, arch: Architecture, lengths: Lengths) -> float:
    """Estimate the seconds of a step without weight sync, even if the GPUs have too little memory."""
    return times(config, arch, training_states(arch, config.megatron), _room(config, arch), lengths).step


def _room(config: Config, arch: Architecture) -> EngineRoom:
    engine = config.rollout.engine
    return engine_room(arch, engine, int(engine.mem_fraction * GPUS[config.cluster.gpu].memory))


def _doublings(most: int) -> list[int]:
    """Return the powers of two from 1 to `most`, inclusive."""
    return [1 << power for power in range(most.bit_length())]


def _candidates(config: Config, arch: Architecture) -> Iterator[Config]:
    """Yield a configuration for each placement, engine layout and trainer layout that the search tries.

    Each configuration uses the whole cluster and breaks no rule about layouts. An engine's KV cache has room
    for at least one sequence of maximum length.
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
            room = _room(based, arch)
            if room.tokens < longest or room.requests < 1:
                continue
            for layout in layouts:
                yield _with_layout(based, layout)


# Layout of a trainer that divides any model, so that only the engine's sizes can break a rule.
_ONE_RANK = ParallelSizes().settings()


def _placements(config: Config) -> Iterator[tuple[Placement, int, int]]:
    """Yield each division of the cluster to try, as (placement, GPUs of the trainer, GPUs of all engines)."""
    nodes, per_node = config.cluster.nodes, config.cluster.gpus_per_node
    gpus = nodes * per_node
    yield Placement.colocated, gpus, gpus
    unit = per_node if nodes > 1 else 1
    # With staleness, trainer and engines work at the same time. The best division then matters more, so more
    # divisions are tried.
    parts = 8 if config.rollout.staleness else 4
    shares = dict.fromkeys(gpus * part // parts // unit * unit for part in range(1, parts))
    yield from ((Placement.separate, share, gpus - share) for share in shares if share)


def _layouts(config: Config, arch: Architecture, gpus: int) -> Iterator[ParallelSizes]:
    """Yield the trainer layouts to try, which use exactly `gpus` GPUs and break no rule about layouts.

    If the run has a reward model, the layouts break no rule for this model either.
    """
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
        if SIZES.violations(sizes) or SIZES_OF_MODEL.violations(sizes, arch):
            continue
        if scoring and SIZES_OF_MODEL.violations(replace(sizes, pipeline_layers=None), scoring.arch):
            continue
        yield sizes


def _with_layout(config: Config, sizes: ParallelSizes) -> Config:
    """Return the configuration with this trainer layout, and with the fastest settings for the layout.

    The optimizer is distributed and not offloaded, and nothing is recomputed. Colocated ranks sleep while
    engines generate.
    """
    config = with_values(
        config,
        "train",
        max_tokens_per_micro_batch=_micro_batch(config, sizes.cp),
        constant_length_packs=sizes.pp > 1,
    )
    return with_values(
        with_values(config, "optimizer", offload=False),
        "megatron",
        **sizes.settings(),
        distributed_optimizer=True,
        recompute=Recompute.none,
        sleep=config.cluster.placement == Placement.colocated,
    )


def _micro_batch(config: Config, cp: int) -> int:
    """Return the number of tokens of a micro-batch on each of `cp` context-parallel ranks.

    If `cp` is the configured size, the number is the configured one. Otherwise the sum over the ranks stays
    the same, or is raised to one sequence of maximum length, and the result is rounded up to a multiple of
    256.
    """
    now, train = config.megatron.context_parallel, config.train
    if cp == now:
        return train.max_tokens_per_micro_batch
    longest = config.data.max_prompt_length + config.rollout.max_response_length
    tokens = max(train.max_tokens_per_micro_batch * now, longest)
    return padded_to(-(-tokens // cp), 256)  # a multiple of everything that CP, SP and FP8 blocks pad to


def _recomputations(arch: Architecture) -> list[dict]:
    """Return the settings of recomputation to try, each as {key of the section megatron: value}.

    There are three: no recomputation, recomputation of the modules of each layer that free the most memory,
    and recomputation of whole layers.
    """
    modules = ["layernorm"]
    modules += ["mlp"] if arch.moe is None or not all(arch.moe.layers) else []
    modules += ["moe"] if arch.moe else []
    selective = {"recompute": Recompute.selective, "recompute_modules": sorted(modules)}
    return [{"recompute": Recompute.none}, selective, {"recompute": Recompute.full}]


def _variants(config: Config, arch: Architecture) -> Iterator[Config]:
    """Yield the configuration with each setting of recomputation, with and without an offloaded optimizer.

    The first variant is the fastest, and the last variant takes the least GPU memory.
    """
    for recompute, offload in product(_recomputations(arch), (False, True)):
        yield with_values(with_values(config, "megatron", **recompute), "optimizer", offload=offload)


def _changes(config: Config, arch: Architecture) -> Iterator[list[tuple[str, dict]]]:
    """Yield possible changes to the configuration that save GPU memory, the cheapest in time first.

    A change is a list of alternatives, such as several values of a key. An alternative is (section, {key in
    the section: new value}).
    """
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
