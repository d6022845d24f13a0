"""Devices of every rank and every engine, on two nodes that declare four GPUs each.

Ray needs no real GPU for that.
"""

import os
import sys
from contextlib import contextmanager

import pytest
import ray
from ray.util.placement_group import placement_group_table

from grpo_megatron.cluster.placement import NODE_ORDER, allocate
from grpo_megatron.config.schema import Config, Placement
from grpo_megatron.errors import UserError

PER_NODE = 4

# Two more starts of Ray.
pytestmark = [pytest.mark.slow, pytest.mark.parametrize("two_nodes", [(PER_NODE, PER_NODE)], indirect=True)]


@ray.remote
class Seen:
    def tell(self):
        return ray.get_runtime_context().get_node_id(), tuple(
            map(int, os.environ["CUDA_VISIBLE_DEVICES"].split(","))
        )

    def environment(self):
        return dict(os.environ)


def configured(placement, group=1, engine_tp=1):
    config = Config()
    config.cluster.placement = placement
    config.megatron.tensor_parallel, config.rollout.engine.tensor_parallel = group, engine_tp
    return config


@contextmanager
def allocated(config, num_ranks, num_engines):
    cluster = allocate(config, num_ranks, num_engines, timeout=20.0)
    try:
        yield cluster
    finally:
        cluster.close()


C, S = Placement.colocated, Placement.separate
# (placement, ranks, of a tensor-parallel group, engines, of an engine)
LAYOUTS = [
    (C, 8, 4, 2, 4),
    (C, 8, 1, 8, 1),
    (C, 8, 2, 1, 8),
    (C, 6, 2, 1, 4),
    (C, 4, 4, 1, 8),
    (S, 4, 2, 2, 2),
    (S, 2, 2, 3, 2),
    (S, 3, 1, 1, 4),
    (S, 1, 1, 2, 3),
]


@pytest.mark.parametrize(("placement", "num_ranks", "group", "num_engines", "engine_tp"), LAYOUTS)
def test_groups_are_within_nodes_and_large_engines_take_whole_ones(
    two_nodes, placement, num_ranks, group, num_engines, engine_tp
):
    with allocated(configured(placement, group, engine_tp), num_ranks, num_engines) as cluster:
        ranks = [(slot.node, slot.device) for slot in cluster.rank_slots]
        engines = [
            [[(slot.node, slot.device) for slot in part] for part in parts] for parts in cluster.engine_nodes
        ]
    assert len(set(ranks)) == num_ranks
    for first in range(0, num_ranks, group):
        assert len({node for node, _ in ranks[first : first + group]}) == 1
    of_engines = [place for parts in engines for part in parts for place in part]
    assert len(set(of_engines)) == len(of_engines) == num_engines * engine_tp
    for parts in engines:
        assert (
            len({node for part in parts for node, _ in part}) == len(parts) == max(1, engine_tp // PER_NODE)
        )
        assert len({len(part) for part in parts}) == 1
    if placement == Placement.colocated:
        # The same devices in the same order, as far as both go.
        assert all(rank == engine for rank, engine in zip(ranks, of_engines, strict=False))
    else:
        assert not set(ranks) & set(of_engines)


def test_nodes_are_in_the_order_of_their_labels(two_nodes):
    """The third node has joined last, and its label says that it is the first."""
    label = {NODE_ORDER: "-1"}
    node = two_nodes.add_node(
        num_cpus=PER_NODE, num_gpus=PER_NODE, object_store_memory=80 * 2**20, labels=label
    )
    try:
        with allocated(configured(S), 3 * PER_NODE, 0) as cluster:
            assert {slot.node for slot in cluster.rank_slots[:PER_NODE]} == {node.node_id}
            assert node.node_id not in {slot.node for slot in cluster.rank_slots[PER_NODE:]}
    finally:
        two_nodes.remove_node(node)


def test_a_failure_after_the_devices_are_reserved_releases_them(two_nodes):
    node = two_nodes.add_node(
        num_cpus=PER_NODE, num_gpus=PER_NODE, object_store_memory=80 * 2**20, labels={NODE_ORDER: "first"}
    )
    try:
        with pytest.raises(ValueError, match="'first'"):
            allocate(configured(S), 3 * PER_NODE, 0)
        assert {group["state"] for group in placement_group_table().values()} == {"REMOVED"}
    finally:
        two_nodes.remove_node(node)


@pytest.mark.parametrize(("placement", "num_ranks", "num_engines", "engine_tp"), [(C, 4, 1, 8), (S, 2, 2, 2)])
def test_processes_are_where_their_slots_are_and_see_their_devices(
    two_nodes, placement, num_ranks, num_engines, engine_tp
):
    """Colocated engines and ranks use a device at the same time, and each takes a share of it."""
    with allocated(configured(placement, 2, engine_tp), num_ranks, num_engines) as cluster:
        parts = [[slot] for slot in cluster.rank_slots] + [
            part for parts in cluster.engine_nodes for part in parts
        ]
        actors = [
            Seen.options(**cluster.options(part[0], {}, [slot.device for slot in part])).remote()
            for part in parts
        ]
        seen = ray.get([actor.tell.remote() for actor in actors], timeout=120)
        assert seen == [(part[0].node, tuple(slot.device for slot in part)) for part in parts]
        for actor in actors:
            ray.kill(actor)


@pytest.mark.parametrize(
    ("config", "ranks", "engines", "says"),
    [
        (
            configured(S, group=8),
            8,
            0,
            "megatron.tensor_parallel=8 exceeds the 4 devices of a node; .* set it to at most 4",
        ),
        (configured(S, engine_tp=6), 0, 1, "rollout.engine.tensor_parallel=6 must be a multiple of 4"),
        (configured(C, group=3, engine_tp=2), 6, 3, "would cross nodes; make one a multiple of the other"),
    ],
)
def test_what_would_cross_nodes_is_refused(two_nodes, config, ranks, engines, says):
    with pytest.raises(UserError, match=says):
        allocate(config, ranks, engines)


def test_what_no_node_has_room_for_is_said(two_nodes):
    """Eight devices are enough in total, but two groups of three leave only one free on each node."""
    with pytest.raises(
        UserError, match=r"in groups of 2, 3 that are each on one node, and the Ray cluster has .*'GPU': 8"
    ):
        allocate(configured(S, group=3, engine_tp=2), 6, 1, timeout=2.0)


def test_ranks_and_engines_find_their_tools_and_agree_on_nccl(two_nodes, monkeypatch, capsys):
    """Engines did not find ninja, and SGLang's setting of NCCL_CUMEM_ENABLE differed from the ranks'."""
    monkeypatch.setenv("NCCL_CUMEM_ENABLE", "1")  # the user's own
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    monkeypatch.setenv("PATH", "/only/on/the/driver")
    with allocated(configured(S, group=2, engine_tp=2), 2, 1) as cluster:
        slots = {"rank": cluster.rank_slots[0], "engine": cluster.engine_slots[0][0]}
        actors = [Seen.options(**cluster.options(slot, {})).remote() for slot in slots.values()]
        environments = ray.get([actor.environment.remote() for actor in actors])
    for found in environments:
        first, _, rest = found["PATH"].partition(os.pathsep)
        assert first == os.path.dirname(sys.executable)
        assert "/bin" in rest.split(os.pathsep)  # the node's own
        assert "/only/on/the/driver" not in rest
        assert (found["NCCL_CUMEM_ENABLE"], found["NCCL_NVLS_ENABLE"]) == ("1", "0")
    assert "CUDA_DEVICE_MAX_CONNECTIONS=32 has no effect" in capsys.readouterr().out
