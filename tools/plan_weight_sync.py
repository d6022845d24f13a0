"""Print how many bytes a weight sync of a model would move, and how long it would take.

    python tools/plan_weight_sync.py MODEL --nodes 16 --trainer tp=8,pp=4 --engine tp=8 [--colocated]
    python tools/plan_weight_sync.py --table

The figures are computed, so the machines need not exist. MODEL is a folder with a config.json; no weights are
read. The trainer's data-parallel size follows from the number of nodes. Without --colocated, half of the
nodes belong to the trainer and half to the engines. --table plans for the models in configs/models; with
--nodes 16 it prints the table of docs/weight-sync.md.
"""

import argparse
from dataclasses import dataclass, replace
from pathlib import Path

from grpo_megatron.errors import UserError
from grpo_megatron.model.entries import EngineLayout
from grpo_megatron.model.families import read_architecture
from grpo_megatron.model.parallel_sizes import ParallelSizes
from grpo_megatron.preflight.layout import SIZES, SIZES_OF_MODEL
from grpo_megatron.weights.sync.cost import Cost, Machine, broadcast_is_cheaper, cost, on_nodes
from grpo_megatron.weights.sync.plan import Layouts, ReshardPlan

MODELS = Path(__file__).resolve().parent.parent / "configs" / "models"


@dataclass(frozen=True)
class Case:
    """A model and parallel layouts whose weight sync is planned.

    model: folder with the model's config.json.
    trainer: the trainer's sizes. The data-parallel size follows from the number of nodes.
    engine: the layout of one engine.
    colocated: True if engines and trainer share GPUs.
    """

    model: str
    trainer: ParallelSizes
    engine: EngineLayout
    colocated: bool = False


def layouts_of(case: Case, nodes: int, gpus_per_node: int) -> Layouts:
    """Return the layouts of trainer and engines for a cluster with `nodes` nodes.

    The data-parallel size and the number of engines follow from the number of GPUs. Raises UserError if the
    layouts are not legal for the model, or if the trainer cannot use all of its GPUs.
    """
    gpus = nodes * gpus_per_node
    for_trainer = gpus if case.colocated else gpus // 2
    replica = case.trainer.tp * case.trainer.cp * case.trainer.pp
    sizes = replace(case.trainer, dp=max(1, for_trainer // replica))
    arch = read_architecture(case.model)
    found = SIZES.violations(sizes) + SIZES_OF_MODEL.violations(sizes, arch)
    if sizes.world_size != for_trainer:
        found.append(
            f"the trainer's {for_trainer} GPUs are not a multiple of the {replica} GPUs of a replica; change "
            "--nodes, --gpus-per-node or --trainer"
        )
    if found:
        raise UserError("; ".join(found))
    num_engines = (gpus if case.colocated else gpus - for_trainer) // case.engine.tp
    return on_nodes(Layouts(arch, sizes, case.engine, num_engines), gpus_per_node, case.colocated)


def row(case: Case, nodes: int, gpus_per_node: int, machine: Machine, bucket_bytes: int) -> tuple[str, ...]:
    layouts = layouts_of(case, nodes, gpus_per_node)
    transport = "shared memory"
    if not case.colocated:
        broadcast = broadcast_is_cheaper(layouts, bucket_bytes, machine)
        layouts = replace(layouts, multicast=broadcast)
        transport = "broadcast" if broadcast else "point to point"
    found: Cost = cost(layouts, machine, bucket_bytes)
    sizes, engine = layouts.sizes, layouts.engine
    return (
        Path(case.model).name,
        str(nodes),
        f"TP{sizes.tp} PP{sizes.pp} DP{sizes.dp}" + (f" EP{sizes.ep}" if sizes.ep > 1 else ""),
        f"{layouts.num_engines} x TP{engine.tp}" + (f" EP{engine.ep}" if engine.ep > 1 else ""),
        "same GPUs" if case.colocated else "own nodes",
        f"{found.network_gb:,.0f}",
        f"{found.fabric_gb:,.0f}",
        f"{found.sent_gb:.1f}",
        f"{found.received_gb:.1f}",
        f"{found.bound:.2f}",
        f"{found.seconds:.2f}",
        transport,
    )


HEAD = (
    "model",
    "nodes",
    "trainer",
    "engines",
    "placement",
    "GB between nodes",
    "GB within nodes",
    "GB out of the busiest GPU",
    "GB into the busiest GPU",
    "bound, s",
    "plan, s",
    "transport",
)


def show(rows: list[tuple[str, ...]]) -> None:
    print("| " + " | ".join(HEAD) + " |")
    print("|" + "---|" * len(HEAD))
    for cells in rows:
        print("| " + " | ".join(cells) + " |")


def show_links(case: Case, nodes: int, gpus_per_node: int) -> None:
    """Print sending rank, relay (if any), receivers and bytes of every link of the weight sync."""
    layouts = layouts_of(case, nodes, gpus_per_node)
    for link, size in ReshardPlan(layouts).volumes(itemsize=2).items():
        via = f" through rank {link.relay_rank}" if link.relay_rank != link.sender else ""
        sender, to = (
            f"rank {link.sender} ({layouts.rank_nodes[link.sender]}){via}",
            ", ".join(map(str, link.receivers)),
        )
        print(f"{sender} -> {to}: {size / 1e9:.3f} GB")


def table() -> list[Case]:
    sp = {"sequence_parallel": True}
    llama = Case(f"{MODELS}/llama-3.1-70b", ParallelSizes(tp=8, pp=4, **sp), EngineLayout(8))
    qwen = Case(f"{MODELS}/qwen3-235b-a22b", ParallelSizes(tp=4, pp=2, ep=16, **sp), EngineLayout(8, 8))
    deepseek = Case(
        f"{MODELS}/deepseek-v3",
        ParallelSizes(tp=4, pp=2, ep=32, pipeline_layers=(30, 31), **sp),
        EngineLayout(16, 16),
    )
    return [llama, replace(llama, colocated=True), qwen, replace(qwen, colocated=True), deepseek]


def parsed(text: str, allowed: tuple[str, ...]) -> dict[str, int]:
    """Parse parallel sizes such as "tp=8,pp=4" into {"tp": 8, "pp": 4}.

    Raises UserError for a name that is not in `allowed`, or a size that is not a positive number.
    """
    found = {}
    for part in text.split(","):
        name, _, value = part.partition("=")
        if name not in allowed or not value.isdigit() or int(value) < 1:
            raise UserError(
                f"{part!r} must have the form NAME=NUMBER with a positive number, where NAME is one of "
                f"{', '.join(allowed)}"
            )
        found[name] = int(value)
    return found


def cases(options: argparse.Namespace) -> list[Case]:
    if options.table:
        return table()
    if options.model is None:
        raise UserError("give a folder with a config.json, or --table")
    trainer = parsed(options.trainer, ("tp", "pp", "cp", "ep", "etp", "vpp"))
    sizes = ParallelSizes(**trainer, sequence_parallel=trainer.get("tp", 1) > 1)
    engine = EngineLayout(**parsed(options.engine, ("tp", "ep")))
    return [Case(options.model, sizes, engine, options.colocated)]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", metavar="MODEL", help="folder with a config.json")
    parser.add_argument("--table", action="store_true", help="print the table of docs/weight-sync.md")
    parser.add_argument(
        "--nodes", type=int, nargs="+", default=[16, 32, 64, 128], help="numbers of nodes, one row for each"
    )
    parser.add_argument("--gpus-per-node", type=int, default=8, help="GPUs of a node; default 8")
    parser.add_argument("--trainer", default="tp=8", help="sizes tp, pp, cp, ep, etp, vpp; default tp=8")
    parser.add_argument("--engine", default="tp=8", help="sizes tp, ep; default tp=8")
    parser.add_argument("--colocated", action="store_true", help="engines on the trainer's GPUs")
    parser.add_argument(
        "--network", type=float, default=50.0, help="GB/s of one GPU between nodes; default 50 (400 Gb/s)"
    )
    parser.add_argument(
        "--fabric", type=float, default=400.0, help="GB/s of one GPU within a node; default 400 (NVLink)"
    )
    parser.add_argument(
        "--latency", type=float, default=30.0, help="latency of a message in microseconds; default 30"
    )
    parser.add_argument(
        "--bucket-bytes",
        type=int,
        default=64 * 2**20,
        help="size of the buckets in which weights travel; default 64 MiB",
    )
    parser.add_argument("--links", action="store_true", help="also print every link with its bytes")
    options = parser.parse_args()
    machine = Machine(options.network, options.fabric, options.latency / 1e6)
    try:
        show(
            [
                row(case, nodes, options.gpus_per_node, machine, options.bucket_bytes)
                for case in cases(options)
                for nodes in options.nodes
            ]
        )
        if options.links:
            for case in cases(options):
                show_links(case, options.nodes[0], options.gpus_per_node)
    except UserError as error:
        parser.exit(2, f"error: {error}\n")


if __name__ == "__main__":
    main()
