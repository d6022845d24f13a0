"""Resharding: plans on random layouts, and real parcels over every channel between threads of one process."""

import dataclasses
import threading
import time
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from grpo_megatron.cluster.store import StoreServer
from grpo_megatron.model.architecture import Architecture, MoE
from grpo_megatron.model.entries import EngineLayout
from grpo_megatron.model.families import weight_map
from grpo_megatron.model.parallel_sizes import ParallelSizes
from grpo_megatron.model.pieces import box
from grpo_megatron.preflight.layout import layout_violations, layout_violations_of_model
from grpo_megatron.weights.sync.order import Order, Setup, Task, Way
from grpo_megatron.weights.sync.parcels import Parcel
from grpo_megatron.weights.sync.plan import EngineRank, Layouts, ReshardPlan
from grpo_megatron.weights.sync.ranks import TrainerRanks
from grpo_megatron.weights.sync.receiver import Receiver
from grpo_megatron.weights.sync.sender import Sender

DENSE = Architecture(
    family="qwen2",
    num_layers=4,
    hidden_size=16,
    ffn_hidden_size=24,
    num_heads=8,
    num_kv_heads=2,
    head_dim=6,
    vocab_size=61,
    max_positions=64,
    rope_theta=1e4,
    rope_scaling=None,
    norm_eps=1e-6,
    qk_norm=False,
    qkv_bias=True,
    tied_embeddings=False,
    dtype=torch.float32,
)
EXPERTS = dataclasses.replace(
    DENSE, family="qwen3_moe", qkv_bias=False, qk_norm=True, moe=MoE(4, 2, 8, True, (True, False, True, True))
)


def hf_tensors(arch, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {
        hf: torch.randn(shape, generator=generator)
        for entry in weight_map(arch).values()
        for hf, shape in zip(entry.hf, entry.shapes, strict=True)
    }


def trainer_parameters(plan, tensors):
    """{rank: {Megatron name: its shard}} as loading would fill them."""
    ranks = TrainerRanks(plan.layouts.sizes, plan.layouts.arch.num_layers)
    found = {rank: {} for rank in range(plan.layouts.sizes.world_size)}
    for entry in plan.entries:
        parts = ranks.shards(entry)
        for shard in range(parts):
            local = torch.zeros(entry.megatron_shape(parts))
            for piece in entry.megatron_pieces(parts, shard):
                piece.of(local).copy_(tensors[piece.hf][box(piece.start, piece.shape)])
            for rank in ranks.holders(entry, shard):
                found[rank][entry.megatron] = local.clone()
    return found


def engine_parameters(plan, tensors=None, dtypes=None):
    """{engine rank: {name: parameter}}, of the HF tensors, or NaN where nothing was written; dtypes: by name, else float32."""
    found = {}
    for me in plan.engine_ranks:
        own = {
            name: torch.full(shape, torch.nan, dtype=dtypes[name] if dtypes else torch.float32)
            for name, shape in plan.engine_shapes.items()
        }
        for entry in plan.entries if tensors else ():
            for piece in entry.engine_pieces(plan.layouts.engine, me.rank):
                piece.of(own[entry.engine]).copy_(tensors[piece.hf][box(piece.start, piece.shape)])
        found[me] = own
    return found


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
def test_every_element_reaches_every_engine_rank_exactly_once(sizes, experts, layout, num_engines, multicast, nodes, spread):
    arch = EXPERTS if experts else DENSE
    sizes = dataclasses.replace(sizes, sequence_parallel=experts and sizes.tp > 1)
    assume(not layout_violations(sizes) and not layout_violations_of_model(sizes, arch))
    assume(experts or layout.ep == 1)
    tp = layout.tp
    where = {}
    if nodes:
        where = {
            "rank_nodes": tuple(str(rank * nodes // sizes.world_size) for rank in range(sizes.world_size)),
            "engine_nodes": tuple(
                str((rank * nodes // tp if spread else engine) % nodes) for engine in range(num_engines) for rank in range(tp)
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
            assert link.carrier == rank or link in plan.carried(link.carrier)
            for part in parts:
                for receiver in link.receivers:
                    if nodes and multicast:
                        assert where["rank_nodes"][link.carrier] == plan.layouts.node_of(receiver)
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


class Cluster:
    """Every rank of the trainer and of the engines as a thread, with its own sender or receiver."""

    def __init__(self, layouts, way, folder="", bucket_bytes=700, timeout=10.0, delta=False, dtype=torch.float32):
        self.server = StoreServer("127.0.0.1", timeout=30)
        self.plan = ReshardPlan(layouts)
        dtypes = {name: self.dtype(name, dtype) for name in self.plan.engine_shapes}
        self.setup = Setup(layouts, way, self.server.address, bucket_bytes, timeout, tuple(dtypes.items()), str(folder), delta)
        self.arrived = engine_parameters(self.plan, dtypes=dtypes)
        cpu = torch.device("cpu")
        made = self.on_all(lambda rank: Sender(self.setup, rank, cpu), lambda me: Receiver(self.setup, me, cpu))
        self.senders = {rank: made[rank] for rank in range(layouts.sizes.world_size)}
        self.receivers = {me: made[me] for me in self.plan.engine_ranks}
        self.number = 0

    def dtype(self, name, of_engine):
        return of_engine

    def trainer_parameters(self, tensors):
        return trainer_parameters(self.plan, tensors)

    def on_all(self, of_trainer, of_engine, without=()):
        """{rank: result}; raises the first exception."""
        results, errors = {}, []

        def run(key, function):
            try:
                results[key] = function(key)
            except Exception as error:
                errors.append(error)

        calls = [(rank, of_trainer) for rank in range(self.plan.layouts.sizes.world_size)]
        calls += [(me, of_engine) for me in self.plan.engine_ranks]
        threads = [threading.Thread(target=run, args=call) for call in calls if call[0] not in without]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        return results

    def sync(self, tensors, task=Task.transfer, full=True, without=()):
        self.number += 1
        order = Order(task, self.number, self.setup, full=full)
        have = self.trainer_parameters(tensors)
        return self.on_all(
            lambda rank: self.senders[rank].send(order, have[rank]),
            lambda me: self.receivers[me].receive(order, self.arrived[me]),
            without,
        )

    def check(self, tensors):
        expected = engine_parameters(self.plan, tensors, dict(self.setup.dtypes))
        for me in self.plan.engine_ranks:
            for name, value in expected[me].items():
                assert torch.equal(self.arrived[me][name].float().nan_to_num(7.0), value.float().nan_to_num(7.0)), (
                    f"{name} at {me}"
                )

    def close(self):
        for side in (*self.senders.values(), *self.receivers.values()):
            side.close()


def tp2_pp2_to_two_engines(multicast=False, arch=DENSE, **changes):
    sizes = dataclasses.replace(ParallelSizes(tp=2, pp=2), **changes)
    return Layouts(arch, sizes, EngineLayout(2), 2, multicast)


@pytest.fixture
def cluster(tmp_path):
    made = []

    def make(layouts, way, **settings):
        made.append(Cluster(layouts, way, folder=tmp_path / "weights", **settings))
        return made[-1]

    yield make
    for one in made:
        one.close()


WAYS = [(way, multicast) for way in Way for multicast in (False, True)]


@pytest.mark.slow_but(3)
@pytest.mark.parametrize(("way", "multicast"), WAYS)
def test_every_transport_brings_every_parameter_and_its_digest(cluster, way, multicast):
    one = cluster(tp2_pp2_to_two_engines(multicast), way)
    for seed in (1, 2):
        tensors = hf_tensors(DENSE, seed)
        answers = one.sync(tensors)
        one.check(tensors)
        sealed = {link: seal for rank in range(4) for link, seal in answers[rank].seals.items()}
        for me in one.plan.engine_ranks:
            assert answers[me].wrong == ()
            assert answers[me].seals == {link.name: sealed[link.name] for link in one.plan.incoming(me)}


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
    """Stage 0 is on one node and stage 1 on the other, engines within one of them or over both: each needs what both have."""
    layouts = dataclasses.replace(
        tp2_pp2_to_two_engines(True), within_nodes=True, rank_nodes=("a", "a", "b", "b"), engine_nodes=tuple(engine_nodes)
    )
    one = cluster(layouts, Way.shared_memory, delta=delta)
    carriers = {link.carrier for rank in range(4) for link in one.plan.outgoing(rank) if link.carrier != link.sender}
    assert carriers == expected
    for seed in (1, 2):
        tensors = hf_tensors(DENSE, seed)
        answers = one.sync(tensors, full=seed == 1)
        one.check(tensors)
        assert not any(answers[me].wrong for me in one.plan.engine_ranks)
    one.sync(tensors, Task.verify)


def test_experts_reach_an_engine_that_divides_them(cluster):
    layouts = Layouts(EXPERTS, ParallelSizes(dp=2, ep=2), EngineLayout(2, ep=2), 1, multicast=True)
    one = cluster(layouts, Way.shared_memory)
    tensors = hf_tensors(EXPERTS)
    one.sync(tensors)
    one.check(tensors)


def test_weights_are_cast_to_what_the_engine_has(cluster):
    one = cluster(tp2_pp2_to_two_engines(True), Way.shared_memory, dtype=torch.bfloat16)
    tensors = hf_tensors(DENSE)
    answers = one.sync(tensors)
    one.check(tensors)
    assert sum(answers[rank].bytes for rank in range(4)) < 2.2 * sum(tensor.numel() for tensor in tensors.values())


def test_a_verification_sends_digests_alone_and_finds_what_was_changed(cluster):
    one = cluster(tp2_pp2_to_two_engines(True), Way.shared_memory)
    tensors = hf_tensors(DENSE)
    transferred = one.sync(tensors)
    verified = one.sync(tensors, Task.verify)
    me = EngineRank(1, 0)
    assert not any(verified[receiver].wrong for receiver in one.plan.engine_ranks)
    assert verified[me].seals == transferred[me].seals
    assert sum(verified[rank].bytes for rank in range(4)) < 0.1 * sum(transferred[rank].bytes for rank in range(4))
    one.arrived[me]["model.layers.2.self_attn.qkv_proj.weight"][0, 0] += 1e-3
    verified = one.sync(tensors, Task.verify)
    assert verified[me].wrong == ("model.layers.2.self_attn.q_proj.weight",)
    assert not any(verified[receiver].wrong for receiver in one.plan.engine_ranks if receiver != me)


@pytest.mark.parametrize("place", ["data", "digest"])
def test_a_bucket_that_is_corrupted_on_its_way_names_its_tensor(cluster, monkeypatch, place):
    one = cluster(tp2_pp2_to_two_engines(True), Way.disk)
    send = type(one.senders[3]._channel).send
    broken = []

    def corrupting(channel, parcel, payload):
        if channel is one.senders[3]._channel and not broken:
            payload[5 if place == "data" else parcel.data_bytes + 1] ^= 4
            broken.append(parcel)
        send(channel, parcel, payload)

    monkeypatch.setattr(type(one.senders[3]._channel), "send", corrupting)
    answers = one.sync(hf_tensors(DENSE))
    (parcel,) = broken
    wrong = {me: answers[me].wrong for me in one.plan.engine_ranks if answers[me].wrong}
    assert wrong == dict.fromkeys(parcel.link.receivers, (parcel.runs[0][0],))


@pytest.mark.slow_when(lambda way: way != Way.groups)
@pytest.mark.parametrize("way", [Way.shared_memory, Way.groups, Way.disk])
def test_a_sender_that_is_gone_ends_the_wait_of_the_engines(cluster, way):
    # The same seconds are all that the processes have to find each other. Of 3 a machine's slow answers once left too few.
    one = cluster(tp2_pp2_to_two_engines(), way, timeout=10.0)
    one.sync(hf_tensors(DENSE))
    with pytest.raises(TimeoutError, match="did not come within 10 s"):
        one.sync(hf_tensors(DENSE), without=(2,))


@pytest.mark.slow
def test_a_sync_that_moves_on_may_take_longer_than_the_timeout(cluster, monkeypatch):
    one = cluster(tp2_pp2_to_two_engines(True), Way.shared_memory, timeout=6.0, bucket_bytes=300)
    unpack = Parcel.unpack

    def slowly(parcel, buffer, parameters):
        time.sleep(0.16)
        unpack(parcel, buffer, parameters)

    monkeypatch.setattr(Parcel, "unpack", slowly)
    tensors = hf_tensors(DENSE)
    answers = one.sync(tensors)
    assert answers[0].seconds["all"] > 6.0
    one.check(tensors)


def changed(tensors, share, seed):
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.where(torch.rand(tensor.shape, generator=generator) < share, tensor + 1, tensor)
        for name, tensor in tensors.items()
    }


@pytest.mark.slow_when(lambda way: way != Way.shared_memory)
@pytest.mark.parametrize("way", list(Way))
def test_a_delta_is_exact_and_small(cluster, way):
    one = cluster(tp2_pp2_to_two_engines(way != Way.groups), way, delta=True, bucket_bytes=4000)
    tensors = hf_tensors(DENSE)
    sent = {}
    for share in (1.0, 0.0, 0.01, 0.1, 1.0):
        tensors = changed(tensors, share, seed=int(100 * share))
        answers = one.sync(tensors, full=not sent)
        one.check(tensors)
        assert not any(answers[me].wrong for me in one.plan.engine_ranks)
        sent[share] = sum(answers[rank].bytes for rank in range(4))
    assert sent[0.0] < sent[0.01] < sent[0.1] < sent[1.0]
    assert sent[0.01] < 0.15 * sent[1.0]


@pytest.mark.slow
def test_a_delta_on_other_weights_than_the_sender_thinks_is_noticed(cluster):
    one = cluster(tp2_pp2_to_two_engines(True), Way.shared_memory, delta=True)
    tensors = hf_tensors(DENSE)
    one.sync(tensors)
    me = EngineRank(0, 1)
    one.arrived[me]["model.norm.weight"].fill_(0.0)  # as in an engine that was started anew
    tensors = changed(tensors, 0.01, seed=3)
    assert "model.norm.weight" in one.sync(tensors, full=False)[me].wrong
    assert one.sync(tensors, full=True)[me].wrong == ()
    one.check(tensors)
