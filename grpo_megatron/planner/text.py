"""Plans as text that `grpo-megatron plan` prints."""

import shlex

from grpo_megatron.capabilities import GPUS
from grpo_megatron.config.keys import value_text
from grpo_megatron.config.load import flat
from grpo_megatron.config.schema import Config, Recompute
from grpo_megatron.logs import table_text
from grpo_megatron.planner.lengths import Lengths
from grpo_megatron.planner.memory import Memory
from grpo_megatron.planner.plan import Plan, gb
from grpo_megatron.planner.rates import LINKS
from grpo_megatron.planner.traffic import StepTraffic

MODEL_OF_TIME = (
    "Times come from a performance model (docs/planner.md) that has not been compared with runs on GPUs."
)


def trainer_text(config: Config) -> str:
    """Format the trainer's layout as text, such as `TP8 PP2 DP8`."""
    megatron = config.megatron
    sizes = {
        "TP": megatron.tensor_parallel,
        "PP": megatron.pipeline_parallel,
        "VPP": megatron.virtual_pipeline,
        "CP": megatron.context_parallel,
        "EP": megatron.expert_parallel,
        "ETP": megatron.expert_tensor_parallel,
        "DP": megatron.data_parallel,
    }
    return " ".join(f"{axis}{size}" for axis, size in sizes.items() if size > 1) or "one rank"


def engines_text(config: Config) -> str:
    """Format the engines' layout as text, such as `16 x TP8, colocated`."""
    engine = config.rollout.engine
    return f"{engine.num_engines} x TP{engine.tensor_parallel}, {config.cluster.placement.value}"


def cluster_text(config: Config) -> str:
    nodes = config.cluster.nodes
    return f"{nodes} node{'s' if nodes > 1 else ''} of {config.cluster.gpus_per_node} {config.cluster.gpu}"


def recomputation_text(config: Config) -> str:
    megatron = config.megatron
    if megatron.recompute != Recompute.selective:
        return megatron.recompute.value
    return f"selective ({', '.join(megatron.recompute_modules)})"


def changes_text(before: Config, after: Config) -> str:
    """Return the settings of `after` that differ from `before`, as arguments `key=value ...` for a shell."""
    old = flat(before)
    return " ".join(
        shlex.quote(f"{key}={value_text(value)}") for key, value in flat(after).items() if value != old[key]
    )


def plan_text(found: Plan, lengths: Lengths) -> str:
    """Format a plan for `grpo-megatron plan`: layout, memory and times.

    found: a plan that fits the GPUs' memory. Other plans have no times.
    lengths: the mean lengths of prompts and responses that the plan assumes.
    """
    config = found.config
    gpus = config.cluster.nodes * config.cluster.gpus_per_node
    idle = gpus - found.times.gpus
    lines = [
        f"{config.model.path} on {cluster_text(config)}"
        + (f"; {idle} of {gpus} GPUs are idle" if idle else ""),
        f"trainer: {trainer_text(config)}, {config.megatron.precision.value}, recomputation: "
        f"{recomputation_text(config)}",
        f"engines: {engines_text(config)}",
        "",
        memory_text(found.memory),
        *capacity_lines(found, lengths),
        "",
        times_text(found, lengths),
    ]
    return "\n".join(lines)


def memory_text(found: Memory) -> str:
    items = dict.fromkeys(item for moment in found.moments for item in moment.items)
    rows = [
        [item, *(gb(moment.items[item]) if moment.items.get(item) else "" for moment in found.moments)]
        for item in items
        if any(moment.items.get(item) for moment in found.moments)
    ]
    rows.append(["total", *(gb(moment.total) for moment in found.moments)])
    head = ["GB of the fullest GPU", *(moment.name for moment in found.moments)]
    return table_text([head, *rows]) + f"\nusable: {gb(found.usable)} of {gb(found.capacity)} GB"


def capacity_lines(found: Plan, lengths: Lengths) -> list[str]:
    config, memory = found.config, found.memory
    longest = config.data.max_prompt_length + config.rollout.max_response_length
    lines = []
    if memory.rank_asleep:
        lines.append(
            f"asleep: a rank still holds {gb(memory.rank_asleep)} GB, an engine {gb(memory.engine_asleep)} GB"
        )
    lines.append(f"host memory of a node: {_sum_text(memory.host)}")
    if memory.files:
        lines.append(f"files of a node in megatron.offload_folder: {_sum_text(memory.files)}")
    tokens, requests = memory.room.tokens, memory.room.requests
    lines.append(
        f"KV cache of an engine: {tokens:,} tokens, {tokens // longest:,} sequences of {longest:,} tokens, "
        f"{int(tokens / lengths.sequence):,} of {lengths.sequence:,.0f}"
        + (f"; recurrent states of {requests:,} requests at once" if memory.room.state_bytes else "")
    )
    return lines


def _sum_text(sizes: dict[str, int]) -> str:
    items = ", ".join(f"{what} {size / 1e9:.0f}" for what, size in sizes.items())
    return f"{sum(sizes.values()) / 1e9:.0f} GB" + (f" ({items})" if items else "")


def times_text(found: Plan, lengths: Lengths) -> str:
    taken = found.times
    rows = [
        [phase, f"{seconds:.1f}", f"{seconds / taken.step:.0%}"] for phase, seconds in taken.seconds.items()
    ]
    rows.append(["step", f"{taken.step:.1f}", ""])
    beside = []
    if taken.beside:
        engines, trainer = (1 - own / taken.step for own in (taken.of_engines, taken.of_trainer))
        beside = [
            "rollout.staleness: generation takes place beside the other phases; the engines are idle for "
            f"{engines:.0%} of the step, the trainer for {trainer:.0%}. Give GPUs of the one that is idle to "
            "the other"
        ]
    return "\n".join(
        [
            table_text([["seconds", "", "share"], *rows]),
            *beside,
            f"{taken.tokens_per_second_per_gpu:,.0f} tokens/s/GPU with prompts of {lengths.prompt:,.0f} and "
            f"responses of {lengths.response:,.0f} tokens on average; MFU of the training pass "
            f"{taken.mfu:.0%}",
            bottleneck_text(found),
            MODEL_OF_TIME,
        ]
    )


def bottleneck_text(found: Plan) -> str:
    taken, tightest = found.times, found.memory.tightest
    return (
        f"bottleneck: {taken.bottleneck} ({taken.seconds[taken.bottleneck] / taken.step:.0%} of the step); "
        f"memory: {tightest.name} ({tightest.total / found.memory.usable:.0%}, most of it "
        f"{tightest.largest_item})"
    )


def search_text(config: Config, found: list[Plan], lengths: Lengths) -> str:
    """Format the plans that a search found as a table, followed by the changed settings of the first plan.

    config: the configuration that the search started from.
    found: the plans, the fastest first. There must be at least one.
    lengths: the mean lengths of prompts and responses that the plans assume.
    """
    head = ["trainer", "engines", "recomputation", "optimizer", "GB", "step, s", "tokens/s/GPU", "bottleneck"]
    rows = [
        [
            trainer_text(each.config),
            engines_text(each.config),
            recomputation_text(each.config),
            "offloaded" if each.config.optimizer.offload else "on the device",
            gb(each.memory.fullest.total),
            f"{each.times.step:.1f}",
            f"{each.times.tokens_per_second_per_gpu:,.0f}",
            f"{each.times.bottleneck}; {each.memory.tightest.largest_item} ({each.memory.tightest.name})",
        ]
        for each in found
    ]
    return "\n".join(
        [
            f"{config.model.path} on {cluster_text(config)}: the quickest legal layouts that fit, with "
            f"prompts of {lengths.prompt:,.0f} and responses of {lengths.response:,.0f} tokens on average",
            "",
            table_text([head, *rows]),
            "",
            f"GB: memory of the fullest GPU, of {gb(found[0].memory.usable)} usable. bottleneck: the "
            "longest phase, and the largest memory item at the tightest moment other than generation, "
            "which always fills its KV cache. Times do not include weight syncs.",
            MODEL_OF_TIME,
            "",
            "The first layout is this configuration with:",
            changes_text(config, found[0].config) or "no change",
        ]
    )


def data_text(found: Plan, moved: StepTraffic, lengths: Lengths) -> str:
    """Format the bytes that a step moves over each link, and the driver's CPU time for them.

    found: a plan that fits the GPUs' memory, with the cost of the weight sync (found.sync).
    moved: the data that a step of this plan moves, without the weight sync.
    lengths: the mean lengths of prompts and responses that `found` and `moved` assume.
    """
    config = found.config
    weights = 1e9 * (found.sync.network_gb + found.sync.fabric_gb)
    links = moved.links | {"trainer to engines: weights": weights}
    rows = [[link, f"{size / 1e6:,.1f}"] for link, size in links.items()]
    lines = [
        f"{config.model.path} on {cluster_text(config)}: a step of {moved.rows:,} sequences, with prompts of "
        f"{lengths.prompt:,.0f} and responses of {lengths.response:,.0f} tokens on average",
        "",
        table_text([["MB of a step", ""], *rows]),
    ]
    if moved.received:
        card = LINKS * GPUS[config.cluster.gpu].speed.network
        seconds = max(moved.received, moved.sent) / card
        lines.append(
            f"the busiest store receives {moved.received / 1e6:,.1f} MB from other nodes, or sends up to "
            f"{moved.sent / 1e6:,.1f} MB to them: at least {seconds:.2f} s at the {card / 1e9:.0f} GB/s of "
            "one GPU's network card"
        )
    driver = moved.row_seconds + moved.call_seconds
    return "\n".join(
        [
            *lines,
            "",
            f"driver: {driver:.2f} CPU seconds: {moved.row_seconds:.2f} for {moved.rows:,} rows and "
            f"{moved.call_seconds:.2f} for {moved.calls:,} calls to trainer nodes; "
            f"{driver / found.times.step:.1%} of the step of {found.times.step:.1f} s",
            "A row (without its texts) and a call cost what benchmarks/controller.py measured "
            "(docs/performance.md).",
            MODEL_OF_TIME,
        ]
    )
