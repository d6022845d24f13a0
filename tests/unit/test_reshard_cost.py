"""The computed cost of a weight sync, against numbers by hand."""

from dataclasses import replace
from pathlib import Path

import pytest

from grpo_megatron.model.entries import EngineLayout
from grpo_megatron.model.families import read_architecture
from grpo_megatron.model.parallel_sizes import ParallelSizes
from grpo_megatron.weights.sync.cost import Machine, broadcast_is_cheaper, cost, on_nodes
from grpo_megatron.weights.sync.plan import Layouts
from tests.tools import run_tool

LLAMA_70B = read_architecture("configs/models/llama-3.1-70b")
SMALL = replace(
    LLAMA_70B, num_layers=4, hidden_size=1024, ffn_hidden_size=4096, num_heads=16, num_kv_heads=8, head_dim=64
)
BUCKET = 64 * 2**20
PARAMETERS = 70_553_706_496


def on_128_gpus(engines=16, **changes):
    sizes = ParallelSizes(tp=8, pp=4, dp=4, sequence_parallel=True)
    return on_nodes(
        Layouts(LLAMA_70B, sizes, EngineLayout(8), engines),
        gpus_per_node=8,
        colocated=changes.get("colocated", False),
    )


@pytest.mark.slow
def test_70b_on_its_own_engines_takes_what_a_card_needs_for_its_share():
    machine = Machine(network=50.0, latency=0.0)
    found = cost(on_128_gpus(), machine, BUCKET)
    share = 2 * PARAMETERS / 8 / 1e9
    assert found.received_gb == pytest.approx(share, rel=1e-3)  # norms and routers are on every rank
    assert found.network_gb == pytest.approx(16 * 8 * share, rel=1e-3)
    assert found.bound == pytest.approx(share / 50, rel=1e-3)
    assert found.seconds < 1.1 * found.bound
    assert found.fabric_gb == 0
    # Each latency of a message counts.
    slow = cost(on_128_gpus(), Machine(network=50.0, latency=0.01), BUCKET)
    assert slow.seconds == pytest.approx(found.seconds + 0.01 * found.messages)


def test_70b_colocated_reads_what_its_own_node_has_without_the_network():
    found = cost(on_128_gpus(colocated=True), Machine(latency=0.0), BUCKET)
    # A node has one of four stages; the rest comes in through its eight cards.
    assert found.network_gb == pytest.approx(16 * 0.75 * 2 * PARAMETERS / 1e9, rel=0.05)
    assert found.seconds < 1.5 * found.bound


def test_experts_of_an_engine_on_two_nodes_come_from_all_who_hold_them():
    """Each of the engine's two nodes has half of the experts.

    They once came from half of their holders, in twice the time.
    """
    arch = read_architecture("configs/models/qwen3-30b-a3b")
    arch = replace(arch, num_layers=2, vocab_size=1024, moe=replace(arch.moe, layers=(True, True)))
    sizes = ParallelSizes(tp=4, ep=16, dp=8, sequence_parallel=True)
    found = cost(
        on_nodes(Layouts(arch, sizes, EngineLayout(16, 16), 4), gpus_per_node=8, colocated=False),
        Machine(),
        BUCKET,
    )
    assert found.sent_gb < 1.2 * found.network_gb / sizes.world_size


@pytest.mark.parametrize("multicast", [False, True])
@pytest.mark.parametrize("engines", [1, 3])
def test_no_sync_is_faster_than_the_bound(engines, multicast):
    """Bytes that stay within a node were counted at the speed of the network, eight times too slow."""
    layouts = Layouts(SMALL, ParallelSizes(tp=2, dp=2), EngineLayout(4), engines)
    layouts = replace(on_nodes(layouts, gpus_per_node=8, colocated=False), multicast=multicast)
    machine = Machine(latency=0.0)
    found = cost(layouts, machine, BUCKET)
    assert 0.2 * found.seconds < found.bound <= found.seconds
    # The first engine is on the trainer's node, and any others are on nodes of their own.
    assert (found.network_gb > 0) == (engines > 1)
    speed = machine.fabric if engines == 1 else machine.network
    assert found.bound == pytest.approx(found.received_gb / speed, rel=1e-6)


@pytest.mark.parametrize(("engines", "broadcast"), [(1, False), (64, True)])
def test_a_small_model_is_broadcast_to_many_engines(engines, broadcast):
    layouts = on_nodes(
        Layouts(SMALL, ParallelSizes(), EngineLayout(1), engines), gpus_per_node=8, colocated=False
    )
    assert broadcast_is_cheaper(layouts, BUCKET) == broadcast


def test_a_large_layout_would_need_too_many_groups():
    assert not broadcast_is_cheaper(on_128_gpus(), BUCKET)


@pytest.mark.slow
def test_a_sync_planned_on_paper(capsys):
    """The model does not exist here, and the numbers are those above. Illegal layouts are refused."""
    arguments = ["configs/models/llama-3.1-70b", "--nodes", 16, "--trainer", "tp=8,pp=4"]
    text, _ = run_tool("plan_weight_sync", *arguments)
    assert "| TP8 PP4 DP2 | 8 x TP8 | own nodes | 1,129 | 0 | 18.2 | 17.6 | 0.35 | 0.37 |" in text
    assert "point to point" in text
    links, _ = run_tool("plan_weight_sync", *arguments, "--links")
    assert "rank 0 (node0) -> rank 0 of engine 0: " in links
    assert (
        "(model chunks: 3, layers: 80)"
        in run_tool("plan_weight_sync", *arguments[:-1], "tp=8,pp=3", status=2)[1]
    )
    assert (
        "must have the form NAME=NUMBER with a positive number, where NAME is one of tp, pp"
        in run_tool("plan_weight_sync", *arguments[:-1], "tp=8,xp=3", status=2)[1]
    )


@pytest.mark.slow
def test_the_documented_table_is_that_of_the_tool():
    table, _ = run_tool("plan_weight_sync", "--table", "--nodes", 16)
    page = Path("docs/weight-sync.md").read_text(encoding="utf-8")
    assert len(table.splitlines()) == 7
    assert set(table.splitlines()) <= set(page.splitlines())
