"""Resharding: plans for random layouts, and real parcels over every transport between threads of one
process.
"""

import dataclasses
import time
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from grpo_megatron.config.weight_sync import Transport
from grpo_megatron.model.entries import EngineLayout
from grpo_megatron.model.parallel_sizes import ParallelSizes
from grpo_megatron.preflight.layout import SIZES, SIZES_OF_MODEL
from grpo_megatron.weights.sync.messages import SyncKind
from grpo_megatron.weights.sync.parcels import Parcel
from grpo_megatron.weights.sync.plan import EngineRank, Layouts, ReshardPlan
from tests.unit.sync_cluster import (
    DENSE,
    EXPERTS,
    TRANSPORTS,
    Cluster,
    engine_parameters,
    hf_tensors,
    tp2_pp2_to_two_engines,
    trainer_parameters,
)

sizes = st.builds(
    ParallelSizes,
    tp=st.sampled_from([1, 2, 4]),
    pp=st.sampled_from([1, 2]),
    dp=st.sampled_from([1, 2, 3, 4]),
    cp=st.sampled_from([1, 2]),
    vpp=st.sampled_from([1, 2]),
    ep=st.sampled_from([1, 2, 4]),
    etp=st.sampled_from([1, 2]),
)


ENGINE_LAYOUTS = [
    EngineLayout(tp, ep, attention_dp)
    for tp in (1, 2, 4, 8)
    for ep in (1, 2, 4)
    for attention_dp in (1, 2, 4)
    if tp % ep == tp % attention_dp == 0
]


@pytest.mark.slow
@settings(max_examples=8, deadline=None)
@given(
    sizes=sizes,
    experts=st.booleans(),
    layout=st.sampled_from(ENGINE_LAYOUTS),
    num_engines=st.integers(1, 5),
    multicast=st.booleans(),
    nodes=st.sampled_from([0, 1, 2]),
    spread=st.booleans(),
)
def test_every_element_reaches_every_engine_rank_exactly_once(
    sizes, experts, layout, num_engines, multicast, nodes, spread
):
    arch = EXPERTS if experts else DENSE
    sizes = dataclasses.replace(sizes, sequence_parallel=experts and sizes.tp > 1)
    assume(not SIZES.violations(sizes) and not SIZES_OF_MODEL.violations(sizes, arch))
    assume(experts or layout.ep == 1)
    tp = layout.tp
    where = {}
    if nodes:
        where = {
            "rank_nodes": tuple(str(rank * nodes // sizes.world_size) for rank in range(sizes.world_size)),
            "engine_nodes": tuple(
                str((rank * nodes // tp if spread else engine) % nodes)
                for engine in range(num_engines)
                for rank in range(tp)
            ),
        }
        assume(not multicast or set(where["engine_nodes"]) <= set(where["rank_nodes"]))
    plan = ReshardPlan(Layouts(arch, sizes, layout, num_engines, multicast, within_nodes=multicast, **where))
    tensors = hf_tensors(arch)
    have, expected = trainer_parameters(plan, tensors), engine_parameters(plan, tensors)
    arrived = engine_parameters(plan)
    sent = Counter()
    for rank in range(sizes.world_size):
        for link, parts in plan.outgoing(rank).items():
            assert link.sender == rank
            assert link.relay_rank == rank or link in plan.relayed(link.relay_rank)
            for part in parts:
                for receiver in link.receivers:
                    if nodes and multicast:
                        assert where["rank_nodes"][link.relay_rank] == plan.layouts.node_of(receiver)
                    target = part.move.target(arrived[receiver][part.engine])
                    assert target.isnan().all(), f"{part} came twice"
                    target.copy_(part.move.source(have[rank][part.megatron]))
                    sent[link, receiver, part] += 1
    for receiver in plan.engine_ranks:
        assert {name: value.shape for name, value in arrived[receiver].items()} == plan.engine_shapes
        for name, value in arrived[receiver].items():
            np.testing.assert_array_equal(value, expected[receiver][name], err_msg=f"{name} at {receiver}")
        taken = {(link, receiver, part) for link, parts in plan.incoming(receiver).items() for part in parts}
        assert taken == {key for key in sent if key[1] == receiver}


@pytest.fixture
def cluster(tmp_path):
    made = []

    def make(layouts, transport, **settings):
        made.append(Cluster(layouts, transport, folder=tmp_path / "weights", **settings))
        return made[-1]

    yield make
    for one in made:
        one.close()


WITH_MULTICAST = [(transport, multicast) for transport in TRANSPORTS for multicast in (False, True)]


@pytest.mark.slow_but(3)
@pytest.mark.parametrize(("transport", "multicast"), WITH_MULTICAST)
def test_every_transport_brings_every_parameter_and_its_digest(cluster, transport, multicast):
    one = cluster(tp2_pp2_to_two_engines(multicast), transport)
    for seed in (1, 2):
        tensors = hf_tensors(DENSE, seed)
        reports = one.sync(tensors)
        one.check(tensors)
        sent = {
            link: checksum for rank in range(4) for link, checksum in reports[rank].link_checksums.items()
        }
        for me in one.plan.engine_ranks:
            assert reports[me].wrong == ()
            assert reports[me].link_checksums == {
                link.name: sent[link.name] for link in one.plan.incoming(me)
            }


@pytest.mark.slow
@pytest.mark.parametrize("delta", [False, True])
@pytest.mark.parametrize(
    ("engine_nodes", "expected"),
    [
        pytest.param("aabb", {0, 1, 2, 3}, id="within"),
        pytest.param("abab", {0, 3}, id="over"),
        pytest.param("aaaa", {0, 1}, id="on one node alone"),
    ],
)
def test_ranks_of_engines_get_their_weights_from_a_rank_of_their_node(cluster, delta, engine_nodes, expected):
    """Stage 0 is on one node and stage 1 on the other, engines are within one of them or over both.

    Each needs both stages' weights.
    """
    layouts = dataclasses.replace(
        tp2_pp2_to_two_engines(True),
        within_nodes=True,
        rank_nodes=("a", "a", "b", "b"),
        engine_nodes=tuple(engine_nodes),
    )
    one = cluster(layouts, Transport.shared_memory, delta=delta)
    relay_ranks = {
        link.relay_rank
        for rank in range(4)
        for link in one.plan.outgoing(rank)
        if link.relay_rank != link.sender
    }
    assert relay_ranks == expected
    for seed in (1, 2):
        tensors = hf_tensors(DENSE, seed)
        reports = one.sync(tensors, full=seed == 1)
        one.check(tensors)
        assert not any(reports[me].wrong for me in one.plan.engine_ranks)
    one.sync(tensors, SyncKind.verify)


def test_experts_reach_an_engine_that_divides_them(cluster):
    layouts = Layouts(EXPERTS, ParallelSizes(dp=2, ep=2), EngineLayout(2, ep=2), 1, multicast=True)
    one = cluster(layouts, Transport.shared_memory)
    tensors = hf_tensors(EXPERTS)
    one.sync(tensors)
    one.check(tensors)


def test_weights_are_cast_to_what_the_engine_has(cluster):
    one = cluster(tp2_pp2_to_two_engines(True), Transport.shared_memory, dtype=torch.bfloat16)
    tensors = hf_tensors(DENSE)
    reports = one.sync(tensors)
    one.check(tensors)
    assert sum(reports[rank].bytes for rank in range(4)) < 2.2 * sum(
        tensor.numel() for tensor in tensors.values()
    )


def test_a_verification_sends_digests_alone_and_finds_what_was_changed(cluster):
    one = cluster(tp2_pp2_to_two_engines(True), Transport.shared_memory)
    tensors = hf_tensors(DENSE)
    transferred = one.sync(tensors)
    verified = one.sync(tensors, SyncKind.verify)
    me = EngineRank(1, 0)
    assert not any(verified[receiver].wrong for receiver in one.plan.engine_ranks)
    assert verified[me].link_checksums == transferred[me].link_checksums
    assert sum(verified[rank].bytes for rank in range(4)) < 0.1 * sum(
        transferred[rank].bytes for rank in range(4)
    )
    one.arrived[me]["model.layers.2.self_attn.qkv_proj.weight"][0, 0] += 1e-3
    verified = one.sync(tensors, SyncKind.verify)
    assert verified[me].wrong == ("model.layers.2.self_attn.q_proj.weight",)
    assert not any(verified[receiver].wrong for receiver in one.plan.engine_ranks if receiver != me)


@pytest.mark.parametrize("place", ["data", "digest"])
def test_a_bucket_that_is_corrupted_on_its_way_names_its_tensor(cluster, monkeypatch, place):
    one = cluster(tp2_pp2_to_two_engines(True), Transport.disk)
    send = type(one.senders[3]._transport).send
    broken = []

    def corrupting(transport, parcel, payload):
        if transport is one.senders[3]._transport and not broken:
            payload[5 if place == "data" else parcel.data_bytes + 1] ^= 4
            broken.append(parcel)
        send(transport, parcel, payload)

    monkeypatch.setattr(type(one.senders[3]._transport), "send", corrupting)
    reports = one.sync(hf_tensors(DENSE))
    (parcel,) = broken
    wrong = {me: reports[me].wrong for me in one.plan.engine_ranks if reports[me].wrong}
    assert wrong == dict.fromkeys(parcel.link.receivers, (parcel.tensor_spans[0][0],))


@pytest.mark.slow
@pytest.mark.parametrize("transport", [Transport.shared_memory, Transport.groups, Transport.disk])
def test_a_sender_that_is_gone_ends_the_wait_of_the_engines(cluster, transport):
    # The processes have to find each other within the same number of seconds. 3 were once too few on a slow
    # machine.
    one = cluster(tp2_pp2_to_two_engines(), transport, timeout=10.0)
    one.sync(hf_tensors(DENSE))
    with pytest.raises(TimeoutError, match=r"(no process reported \S+ within|took longer than) 10 s"):
        one.sync(hf_tensors(DENSE), without=(2,))


@pytest.mark.slow
def test_a_sync_that_moves_on_may_take_longer_than_the_timeout(cluster, monkeypatch):
    one = cluster(tp2_pp2_to_two_engines(True), Transport.shared_memory, timeout=6.0, bucket_bytes=300)
    unpack = Parcel.unpack

    def slowly(parcel, buffer, parameters):
        time.sleep(0.16)
        unpack(parcel, buffer, parameters)

    monkeypatch.setattr(Parcel, "unpack", slowly)
    tensors = hf_tensors(DENSE)
    reports = one.sync(tensors)
    assert reports[0].seconds["all"] > 6.0
    one.check(tensors)


def changed(tensors, share, seed):
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.where(torch.rand(tensor.shape, generator=generator) < share, tensor + 1, tensor)
        for name, tensor in tensors.items()
    }


@pytest.mark.slow_when(lambda transport: transport != Transport.shared_memory)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_delta_is_exact_and_small(cluster, transport):
    one = cluster(
        tp2_pp2_to_two_engines(transport != Transport.groups), transport, delta=True, bucket_bytes=4000
    )
    tensors = hf_tensors(DENSE)
    sent = {}
    for share in (1.0, 0.0, 0.01, 0.1, 1.0):
        tensors = changed(tensors, share, seed=int(100 * share))
        reports = one.sync(tensors, full=not sent)
        one.check(tensors)
        assert not any(reports[me].wrong for me in one.plan.engine_ranks)
        sent[share] = sum(reports[rank].bytes for rank in range(4))
    assert sent[0.0] < sent[0.01] < sent[0.1] < sent[1.0]
    assert sent[0.01] < 0.15 * sent[1.0]


@pytest.mark.slow
def test_a_delta_on_other_weights_than_the_sender_thinks_is_noticed(cluster):
    one = cluster(tp2_pp2_to_two_engines(True), Transport.shared_memory, delta=True)
    tensors = hf_tensors(DENSE)
    one.sync(tensors)
    me = EngineRank(0, 1)
    one.arrived[me]["model.norm.weight"].fill_(0.0)  # as in an engine that was started anew
    tensors = changed(tensors, 0.01, seed=3)
    assert "model.norm.weight" in one.sync(tensors, full=False)[me].wrong
    assert one.sync(tensors, full=True)[me].wrong == ()
    one.check(tensors)
