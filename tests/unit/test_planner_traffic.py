"""The data of a step as planned, against what a run's own classes send, and relations that must hold."""

import itertools
import os
import pickle
from collections import defaultdict
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import ray
import torch
from ray._private.serialization import _object_ref_deserializer
from ray.core.generated.common_pb2 import Address
from ray.core.generated.core_worker_pb2 import GetObjectStatusReply

from grpo_megatron.algorithm.algorithm import Algorithm
from grpo_megatron.algorithm.mismatch import in_context, measure_mismatch
from grpo_megatron.batch.arrays import Here
from grpo_megatron.batch.prompt import Prompt
from grpo_megatron.batch.sample import Group, WeightSpan
from grpo_megatron.batch.schedule import CostModel
from grpo_megatron.batch.sums import SequenceSums
from grpo_megatron.batch.table import concatenated
from grpo_megatron.batch.train_batch import TrainBatch
from grpo_megatron.cli import main
from grpo_megatron.config.load import read_config
from grpo_megatron.megatron.results import Measurement, TrainResult
from grpo_megatron.metrics import Sum, concrete
from grpo_megatron.model.families import read_architecture
from grpo_megatron.model.parallel_sizes import ParallelSizes
from grpo_megatron.planner.lengths import Lengths
from grpo_megatron.planner.traffic import SECONDS_PER_CALL, SECONDS_PER_ROW, StepData, pickled
from grpo_megatron.rollout.groups import GroupRequest
from grpo_megatron.rollout.sample_store import StoredValue
from grpo_megatron.rollout.trajectory import Episode, Trajectory
from grpo_megatron.rollout.worker import SampledGroup
from grpo_megatron.sglang.request import Completion
from grpo_megatron.trainer.mini_batch import make_mini_batches
from grpo_megatron.trainer.optimizer_steps import OptimizerSteps
from grpo_megatron.trainer.policy import PolicyTrainer
from tests.unit.ragged import ragged
from tools.plan_recipes import recipe

# One node, so that nothing is counted twice: two replicas of two ranks, and engines beside them.
SETTINGS = (
    "data.train=d",
    "model.path=configs/models/qwen3-30b-a3b",
    "moe.routing_replay=engine",
    "cluster.gpu=h100-80g",
    "cluster.nodes=1",
    "cluster.gpus_per_node=8",
    "cluster.placement=separate",
    "megatron.data_parallel=2",
    "megatron.tensor_parallel=2",
    "data.train_batch_size=64",
    "rollout.n=8",
    "train.ppo_mini_batch_size=32",
)
PROMPT, RESPONSE = 100, 300


def data_of(*settings, prompt=PROMPT, response=RESPONSE):
    config = read_config(None, [*SETTINGS, *settings])
    return StepData(config, read_architecture(config.model.path), Lengths(prompt, response))


def links(*settings, **lengths):
    return data_of(*settings, **lengths).traffic().links


def as_ray_pickles(value) -> int:
    """Return the bytes of a message, with references as Ray's reducer and protocol buffers make them."""
    address = Address(node_id=os.urandom(28), ip_address="10.0.123.45", port=34567, worker_id=os.urandom(28))

    class Pickler(pickle.Pickler):
        def reducer_override(self, value):
            if not isinstance(value, ray.ObjectRef):
                return NotImplemented
            status = GetObjectStatusReply(node_ids=[address.node_id], object_size=1_000_000)
            status.object.metadata = b"1"
            parts = (value.binary(), value.call_site(), address.SerializeToString())
            return _object_ref_deserializer, (*parts, status.SerializeToString(), None)

    class Bytes:
        size = 0

        def write(self, data):
            self.size += len(data)

    written = Bytes()
    Pickler(written, protocol=5).dump(value)
    return written.size


class Step:
    """A step with real samples, whose messages are collected."""

    def __init__(self, *settings):
        self.config = read_config(None, [*SETTINGS, "train.old_logprobs=recompute", *settings])
        self.moe = read_architecture(self.config.model.path).moe
        self.random = np.random.default_rng(0)
        self.prompts = [self.prompt(index) for index in range(self.config.data.train_batch_size)]
        self.arrays = {}
        self.answers = [self.answer(index, prompt) for index, prompt in enumerate(self.prompts)]
        self.sent, self.returned = defaultdict(list), defaultdict(list)

    def prompt(self, index):
        ids = self.random.integers(0, 100_000, PROMPT, dtype=np.int32)
        return Prompt(index, ids, "", "", messages=[{"role": "user", "content": ""}])

    def answer(self, index, prompt):
        group, size = ray.ObjectRef(os.urandom(28)), self.config.rollout.n
        samples = [self.sample(index, prompt, index * size + member) for member in range(size)]
        self.arrays[group] = [sample.arrays for sample in samples]
        stored = (
            replace(one, handle=StoredValue(group, 2 * member), texts=StoredValue(group, 2 * member + 1))
            for member, one in enumerate(samples)
        )
        return SampledGroup(index, tuple(stored), ())

    def sample(self, group_id, prompt, trajectory_id):
        trajectory = Trajectory(Episode(prompt, group_id, trajectory_id, 10_000, (1, 0)))
        tokens = int(self.random.integers(RESPONSE - 100, RESPONSE + 101))
        logprobs = self.random.normal(-0.01, 0.01, tokens).astype(np.float32)
        ids, spans = np.zeros(tokens, np.int32), (WeightSpan(3, 0, tokens),)
        shape = (PROMPT + tokens - 1, sum(self.moe.layers), self.moe.top_k)
        routing = np.zeros(shape, np.uint8) if self.config.moe.routing_replay == "engine" else None
        reason = "".join(["st", "op"])  # each answer of an engine has its own string
        trajectory.write(Completion((0, 0), ids, logprobs, reason, spans, routing))
        (sample,) = trajectory.samples(reason)
        reward = float(self.random.integers(0, 2))
        return sample.scored(reward, {"".join(["rew", "ard"]): reward})

    def train(self):
        """Take the step, with ranks that only report. Afterwards `sent` and `returned` have the messages."""
        groups = [
            Group(answer.key, prompt, answer.samples)
            for answer, prompt in zip(self.answers, self.prompts, strict=True)
        ]
        trainer, algorithm = PolicyTrainer.__new__(PolicyTrainer), Algorithm(self.config)
        trainer.sizes, trainer.ranks = ParallelSizes.from_config(self.config.megatron), self
        trainer._steps = OptimizerSteps(self.config.optimizer, SimpleNamespace())
        minis = make_mini_batches(groups, self.config, CostModel(), step=1)
        sums, _ = trainer.measure(minis)
        coefficients, _ = algorithm.coefficients([mini.table for mini in minis], sums)
        for mini, own in zip(minis, coefficients, strict=True):
            trainer.train_mini_batch(mini, own, algorithm.loss)
        return self

    def call(self, method, args_of_replica):
        results = [getattr(self, method.split(".")[1])(*args) for args in args_of_replica]
        self.sent[method] += args_of_replica
        self.returned[method] += results
        return results

    def measure(self, samples, version=None):
        return {key: self.measured(list(itertools.chain(*parts))) for key, parts in samples.items()}

    def measured(self, samples):
        found = (self.arrays[sample.handle.group][sample.handle.index // 2] for sample in samples)
        own = [replace(sample, handle=Here(arrays)) for sample, arrays in zip(samples, found, strict=True)]
        batch = TrainBatch.from_samples(own)
        sums = concatenated([SequenceSums.of(batch.cu_seqlens, batch.loss_mask, batch.loss_mask)])
        return Measurement(sums, *concrete([measure_mismatch([batch])]), False)

    def train_step(self, key, coefficients, loss, step_tokens):
        tokens = ragged(seed=0)
        inputs = replace(tokens.inputs, token_index=torch.arange(len(tokens.logp)))
        _, metrics = loss(tokens.logp, tokens.entropy, inputs)
        metrics |= {"actor/loss": Sum(0.5)}
        return TrainResult(1.0, 1e-6, False, in_context(*concrete([metrics]), [tokens.batch]))


def test_messages_have_the_bytes_of_a_real_step():
    step, found = Step().train(), links()
    requests = [GroupRequest(index, index, 0, prompt) for index, prompt in enumerate(step.prompts)]
    real = {
        "driver to rollout workers: requests, prompt ids": [pickled(requests)],
        "rollout workers to driver: rows of finished groups": (
            as_ray_pickles([answer]) for answer in step.answers
        ),
        "driver to trainer nodes: handles, coefficients": map(
            as_ray_pickles, itertools.chain(*step.sent.values())
        ),
        "trainer nodes to driver: sums, metrics": map(pickled, itertools.chain(*step.returned.values())),
    }
    assert {link: found[link] for link in real} == {
        link: pytest.approx(sum(sizes), rel=0.05) for link, sizes in real.items()
    }


@pytest.mark.parametrize("replay", ["engine", "off"])
def test_arrays_have_the_bytes_of_real_ones(replay):
    settings = ("data.train_batch_size=2", "train.ppo_mini_batch_size=2", f"moe.routing_replay={replay}")
    step = Step(*settings)
    arrays = [one for group in step.arrays.values() for one in group]
    real = sum(value.nbytes for one in arrays for value in vars(one).values() if value is not None)
    tokens = sum(len(one.response_ids) for one in arrays)
    found = data_of(*settings, response=tokens / len(arrays)).array_bytes
    assert found * len(arrays) == pytest.approx(real, rel=0.01)
    assert (found > 400 * 48 * 8 * 0.9) == (replay == "engine")


def test_a_replica_has_sequences_of_as_many_groups_as_planned():
    layout = ("megatron.data_parallel=8", "megatron.tensor_parallel=1", "rollout.n=4")
    step = Step(*layout, "moe.routing_replay=off").train()
    sent = [list(args[0].values()) for args in step.sent["mini_batches.measure"]]
    real = [len({sample.handle.group for parts in own for part in parts for sample in part}) for own in sent]
    expected = data_of(*layout)._groups_of_replica()
    assert np.mean(real) == pytest.approx(expected, rel=0.1)


def test_twice_the_sequences_are_twice_the_bytes():
    small, large = (
        links(f"data.train_batch_size={groups}", f"train.ppo_mini_batch_size={groups}")
        for groups in (1024, 2048)
    )
    for shown in (
        "rollout workers to driver: texts of shown samples",
        "trainer nodes to driver: arrays of shown samples",
    ):
        assert large.pop(shown) == small.pop(shown) > 0
    assert large == {link: pytest.approx(2 * size, rel=0.02) for link, size in small.items()}


def test_tokens_are_in_texts_prompt_ids_and_arrays_alone():
    short, long = links(), links(prompt=2 * PROMPT, response=2 * RESPONSE)
    ratio = {link: long[link] / size for link, size in short.items() if size}
    assert all(
        found == pytest.approx(2 if "arrays" in link or "texts" in link else 1, rel=0.005)
        for link, found in ratio.items()
        if "prompt ids" not in link
    )
    ids = "driver to rollout workers: requests, prompt ids"
    assert long[ids] - short[ids] == pytest.approx(64 * PROMPT * 4, rel=0.01)


def test_nodes_fetch_the_sequences_of_their_replicas():
    """Each of 16 nodes has one engine and half of a replica. The other half is on the next node."""
    config = recipe("llama3_70b_16node")
    found = StepData(config, read_architecture(config.model.path), Lengths.given(config)).traffic()
    array_bytes = 512 * 4 + 3584 * (4 + 1 + 4)
    assert found.received == found.sent == pytest.approx(15 / 16 * 8192 / 8 * array_bytes)
    assert found.links["store to other nodes: arrays"] == pytest.approx(16 * found.received)
    assert found.links["store to all ranks of its node: arrays"] == 16 * 8192 * array_bytes
    # Log-probs once, and four optimizer steps.
    assert (found.rows, found.calls) == (8192, 5 * 16)
    assert found.row_seconds + found.call_seconds == 8192 * SECONDS_PER_ROW + 80 * SECONDS_PER_CALL


def test_the_routing_of_a_layer_goes_to_the_ranks_of_its_stage_only():
    """More stages need more copies of tokens, but not of their routing."""
    node, others = "store to all ranks of its node: arrays", "store to other nodes: arrays"

    def moved(link, stages, replay):
        layout = (f"megatron.pipeline_parallel={stages}", "cluster.gpus_per_node=4")
        return links(*layout, f"moe.routing_replay={replay}")[link]

    tokens = {stages: moved(node, stages, "off") for stages in (1, 2)}
    assert tokens[2] == 2 * tokens[1]
    routing = 2 * 512 * (PROMPT + RESPONSE) * 48 * 8  # to both tensor-parallel ranks
    assert [moved(node, stages, "engine") - tokens[stages] for stages in (1, 2)] == [routing] * 2
    # Engines are on a node of their own, so the routing of each layer goes to one other node.
    assert moved(others, 2, "engine") - moved(others, 2, "off") == pytest.approx(routing / 2)


def test_nothing_is_fetched_within_a_node():
    found = data_of().traffic()
    assert found.received == found.sent == found.links["store to other nodes: arrays"] == 0


def test_handles_go_to_every_node_of_a_replica():
    whole, halves = (
        links(f"cluster.gpus_per_node={size}", "megatron.pipeline_parallel=2") for size in (8, 4)
    )
    handles = "driver to trainer nodes: handles, coefficients"
    assert halves[handles] == 2 * whole[handles]


def test_a_search_has_no_data_of_a_step(capsys):
    assert main(["plan", "--data", "--search", *SETTINGS]) == 2
    assert "leave --search out" in capsys.readouterr().err
