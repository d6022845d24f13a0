"""Bytes that a training step moves over each link, and the driver's CPU seconds for it.

The driver's messages are made from the classes that a run sends, and pickled as Ray pickles them. The bytes
of arrays follow from their dtypes and lengths. All sequences are assumed to have the mean lengths.

Not included: messages of Ray's own, the further groups of dynamic sampling, and what rollout workers exchange
with engines, rewards and environments.
"""

import pickle
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil
from typing import Any

import numpy as np

from grpo_megatron.algorithm.advantages import Credit
from grpo_megatron.algorithm.coefficients import SequenceCoefficients, SequenceWeights
from grpo_megatron.algorithm.losses import PolicyLoss
from grpo_megatron.algorithm.mismatch import measure_mismatch
from grpo_megatron.batch.prompt import Prompt
from grpo_megatron.batch.sample import Sample, WeightSpan
from grpo_megatron.batch.sums import SequenceSums
from grpo_megatron.batch.train_batch import TrainBatch
from grpo_megatron.cluster.bundles import neighbouring_stages
from grpo_megatron.config.schema import Config, Placement, RoutingReplay
from grpo_megatron.megatron.results import Measurement, TrainResult
from grpo_megatron.metrics import concrete
from grpo_megatron.model.architecture import Architecture
from grpo_megatron.model.parallel_sizes import ParallelSizes
from grpo_megatron.planner.lengths import Lengths
from grpo_megatron.rewards.terms import terms_of
from grpo_megatron.rollout.groups import GroupRequest
from grpo_megatron.rollout.sample_store import StoredValue
from grpo_megatron.rollout.shown_trajectories import BYTES_PER_TOKEN, MOST_TOKENS, MOST_TRAJECTORIES
from grpo_megatron.rollout.worker import SampledGroup

# The driver's CPU seconds, as `python benchmarks/controller.py` measured them on 2026-11-27 in a step of
# 8,192 sequences without texts (docs/performance.md). A step makes two calls to each node. With 128 nodes,
# the trainer's part of the step took 0.469 s and the whole step 1.154 s. With each of the 1,024 ranks on a
# node of its own (--ranks-of-node 1), the trainer's part took 1.093 s.
SECONDS_PER_CALL = (1.093 - 0.469) / (2 * (1024 - 128))
SECONDS_PER_ROW = (1.154 - 2 * 128 * SECONDS_PER_CALL) / 8192
# Bytes of text per token. GSM8K's questions have 3.9 bytes for each token of SmolLM2's tokenizer.
TEXT_BYTES = 4
# Bytes that Ray pickles with each reference: id of the object, address of its owner, status of the object.
REFERENCE_PARTS = (28, 77, 39)


@dataclass(frozen=True)
class StepTraffic:
    """Estimated number of bytes, rows (samples) and calls that processes exchange in one training step."""

    links: dict[str, float]
    """{description of a link and its data: bytes per step}, such as {"store to other nodes: arrays": 5e9}."""
    received: float
    """Bytes that the busiest node's object store (Ray) receives from other nodes."""
    sent: float
    """Bytes that the busiest node's object store sends to other nodes, if no other node forwards them."""
    rows: int
    """Number of sequences. The driver has a row (Sample) for each."""
    calls: int
    """Number of calls from the driver to trainer nodes: to each node one for all log-probs, and one for each
    optimizer step."""

    @property
    def row_seconds(self) -> float:
        """CPU seconds that the driver spends on the rows of a step. It has one row for each sample."""
        return self.rows * SECONDS_PER_ROW

    @property
    def call_seconds(self) -> float:
        """CPU seconds that the driver spends on the step's calls to trainer nodes."""
        return self.calls * SECONDS_PER_CALL


class _Reference:
    """Stand-in for a ray.ObjectRef, to compute the size of messages without Ray.

    Its pickle has the size of a real reference. Ray must run to pickle a real one.
    """

    def __reduce__(self):
        return _reference_of_parts, (*map(bytes, REFERENCE_PARTS), "", None)


def _reference_of_parts(*parts) -> _Reference:
    """Make a _Reference (a stand-in for a ray.ObjectRef) when its pickle is loaded.

    A pickle contains the name of the function that loads it. This name is about as long as the name of Ray's
    function in the pickle of a real reference, so that both pickles have the same size.
    """
    return _Reference()


def _own(text: str) -> str:
    """Return a copy of a string, so that the string adds its full size to a made-up message.

    Pickle writes a string object that several samples share only once. In a run, samples share no strings.
    """
    return "".join(text)


def pickled(message: Any) -> int:
    """Return the size in bytes of a message between processes, including its arrays."""
    return len(pickle.dumps(message, protocol=5))


class StepData:
    """Builder of made-up messages and arrays of a training step, to compute how many bytes the step moves.

    The messages have the sizes of real ones, but contain no texts.

    array_bytes: bytes of the arrays of one sequence, including its routing.
    """

    def __init__(self, config: Config, arch: Architecture, lengths: Lengths):
        """Take the numbers and sizes of groups, sequences and arrays from the configuration.

        arch: architecture of the model.
        lengths: mean lengths of prompts and responses, which all sequences are assumed to have.
        """
        self._config, self._dp = config, config.megatron.data_parallel
        self._groups, self._members = config.data.train_batch_size, config.rollout.n
        self._mini_batches = ceil(self._groups / config.train.ppo_mini_batch_size)
        self._of_replica = ceil(self._groups * self._members / self._dp)  # sequences
        self._scores = [term.name for term in terms_of(config.reward)]
        self._prompt, self._response = (max(1, round(mean)) for mean in (lengths.prompt, lengths.response))
        self._arrays = {
            "prompt_ids": np.zeros(self._prompt, np.int32),
            "response_ids": np.zeros(self._response, np.int32),
            "loss_mask": np.ones(self._response, np.bool_),
            # As far from the trainer's log-probs as in bf16, so that the histogram of ratios has a real size.
            "rollout_logprobs": np.random.default_rng(0).normal(0, 0.01, self._response).astype(np.float32),
        }
        stages = ParallelSizes.from_config(config.megatron).stage_layers(arch.num_layers)
        self._routing = [0] * len(stages)  # bytes of the routing of one sequence, on each pipeline stage
        if arch.moe and config.moe.routing_replay == RoutingReplay.engine:
            of_layer = (self._prompt + self._response) * arch.moe.top_k * arch.moe.index_dtype.itemsize
            self._routing = [of_layer * len(arch.moe.routed(layers)) for layers in stages]
        self._without_routing = sum(values.nbytes for values in self._arrays.values())
        self.array_bytes = self._without_routing + sum(self._routing)

    def traffic(self) -> StepTraffic:
        """Compute the bytes that a step moves over each link, and the driver's rows and calls."""
        steps = self._config.train.ppo_epochs * self._mini_batches
        places = _stages_of_nodes(self._config)
        replicas = sum(len({replica for replica, _ in own}) for own in places.values())
        received, sent = self._between_nodes(places)
        requests = [self.request(index) for index in range(self._groups)]
        (measure, train), (measured, trained) = self.to_replica(), self.from_replica()
        to_replica = pickled(measure) + steps * pickled(train)
        from_replica = self._mini_batches * pickled(measured) + steps * pickled(trained)
        sequences = self._groups * self._members
        stored = sequences * self.array_bytes
        sizes = ParallelSizes.from_config(self._config.megatron)
        to_stages = sizes.pp * self._without_routing + sum(self._routing)
        links = {
            "driver to rollout workers: requests, prompt ids": pickled(requests),
            # A chat is sent as text and as messages.
            "driver to rollout workers: texts of prompts": 2 * self._groups * self._prompt * TEXT_BYTES,
            "rollout workers to driver: rows of finished groups": self._groups * pickled([self.answer(0)]),
            "rollout workers to driver: texts of shown samples": self._shown() * self._response * TEXT_BYTES,
            "driver to trainer nodes: handles, coefficients": to_replica * replicas,
            "trainer nodes to driver: sums, metrics": from_replica * self._dp,
            "trainer nodes to driver: arrays of shown samples": self._shown_bytes(),
            "rollout workers to the store of their node: arrays": stored,
            "rollout workers to the store of their node: texts": sequences * self._response * TEXT_BYTES,
            "store to other nodes: arrays": sum(received.values()),
            "store to all ranks of its node: arrays": sequences * sizes.tp * sizes.cp * to_stages,
            "log-probs of old policy and reference: stay on ranks": 0,
        }
        busiest = (max(found.values(), default=0.0) for found in (received, sent))
        return StepTraffic(links, *busiest, sequences, (1 + steps) * len(places))

    def request(self, index: int) -> GroupRequest:
        """Return a made-up request to a rollout worker to sample one group, to compute its size.

        index: index of the group in the step.
        """
        messages = [{"role": "user", "content": ""}]
        prompt = Prompt(index, self._arrays["prompt_ids"].copy(), "", "", messages=messages)
        return GroupRequest(index, index, 0, prompt)

    def answer(self, index: int) -> SampledGroup:
        """Return a made-up answer of a rollout worker for one finished group, to compute its size.

        Each group is answered by a message of its own.

        index: index of the group in the step.
        """
        group, first = _Reference(), index * self._members
        rows = (self._row(first + member, group) for member in range(self._members))
        return SampledGroup(index, tuple(rows), ())

    def _shown(self) -> float:
        """Return the mean number of samples per step whose text the monitor shows."""
        monitor = self._config.monitor
        groups = min(monitor.sample_groups, self._groups)
        return groups * self._members / monitor.samples_every if monitor.samples_every else 0.0

    def _shown_bytes(self) -> float:
        """Return the mean bytes per step of the tokens and log-probs of the trajectories that are shown."""
        every = self._config.monitor.samples_every
        tokens = MOST_TRAJECTORIES * min(self._prompt + self._response, MOST_TOKENS)
        return tokens * BYTES_PER_TOKEN / every if every else 0.0

    def _row(self, index: int, group: _Reference) -> Sample:
        """Return a made-up row of the driver for one sequence, to compute its size.

        A row has the numbers about a sequence, and references to its arrays and texts.

        index: index of the sequence in the step.
        group: reference to the arrays and texts of the sequence's group.
        """
        return Sample(
            index // self._members,
            index,
            StoredValue(group, 2 * (index % self._members)),
            *(self._prompt, self._response, self._response),
            _own("stop"),
            (WeightSpan(1, 0, self._response),),
            texts=StoredValue(group, 2 * (index % self._members) + 1),
            reward=1.0,
            reward_components={_own(name): 1.0 for name in self._scores},
        )

    def to_replica(self) -> tuple[tuple, tuple]:
        """Return made-up arguments of the driver's two kinds of calls to a replica, to compute their size.

        The result is (arguments of the call for all log-probs, arguments of the call for an optimizer step).
        """
        groups = [_Reference() for _ in range(self._groups_of_replica())]
        rows = [self._row(i, groups[i % len(groups)]).for_ranks() for i in range(self._of_replica)]
        base, weight, factor = (np.zeros(ceil(len(rows) / self._mini_batches)) for _ in range(3))
        coefficients = SequenceCoefficients(Credit(base), SequenceWeights(weight, factor), True)
        loss = PolicyLoss.from_config(self._config.algorithm, self._config.mismatch, known_before=False)
        return ({(1, 0): [rows]},), ((1, 0), coefficients, loss, len(rows))

    def from_replica(self) -> tuple[dict, TrainResult]:
        """Return made-up results of the driver's two kinds of calls to a replica, to compute their size.

        The result is (result of the call for log-probs, result of the call for an optimizer step), each for
        one mini-batch. As metrics, both contain only those of the mismatch between engine and trainer, which
        take the most bytes.
        """
        sums = SequenceSums(*(np.zeros(ceil(self._of_replica / self._mini_batches)) for _ in range(5)))
        sample = Sample.of(0, 0, **self._arrays, finish_reason="stop")
        (metrics,) = concrete([measure_mismatch([TrainBatch.from_samples([sample])])])
        return {(1, 0): Measurement(sums, metrics, False)}, TrainResult(1.0, 1e-6, False, metrics)

    def _groups_of_replica(self) -> int:
        """Return the expected number of groups of which a replica gets at least one sequence.

        The sequences of a group are assumed to go to random replicas, because a replica gets sequences by
        their lengths.
        """
        return ceil(self._groups * (1 - (1 - 1 / self._dp) ** self._members))

    def _between_nodes(self, places: Mapping[int, set[tuple[int, int]]]) -> tuple[Counter, Counter]:
        """Return (received, sent), each {node: bytes of arrays that its store exchanges with other nodes}.

        A trainer node receives each sequence of its replicas once for all its ranks. Of a sequence's expert
        routing, it receives only the layers of the pipeline stages that it has.

        places: {trainer node: {(replica, pipeline stage) with ranks on this node}}.
        """
        received, sent = Counter(), Counter()
        for node, own in places.items():
            replicas, stages = {replica for replica, _ in own}, [stage for _, stage in own]
            of_sequence = len(replicas) * self._without_routing + sum(self._routing[one] for one in stages)
            size = self._groups * self._members / self._dp * of_sequence
            for source, share in _sources(self._config).items():
                if source != node:
                    received[node] += share * size
                    sent[source] += share * size
        return received, sent


def _stages_of_nodes(config: Config) -> dict[int, set[tuple[int, int]]]:
    """Return {index of a trainer node: {(data-parallel replica, pipeline stage) with ranks on this node}}."""
    sizes, per_node = ParallelSizes.from_config(config.megatron), config.cluster.gpus_per_node
    slots = neighbouring_stages(list(range(sizes.world_size)), config.megatron, per_node)
    found = defaultdict(set)
    for rank, slot in enumerate(slots):
        stage, replica = divmod(rank // (sizes.tp * sizes.cp), sizes.dp)
        found[slot // per_node].add((replica, stage))
    return found


def _sources(config: Config) -> dict[int, float]:
    """Return {index of a node with engines: share of all groups that its engines sample}."""
    engine, per_node = config.rollout.engine, config.cluster.gpus_per_node
    separate = config.cluster.placement == Placement.separate
    first = ParallelSizes.from_config(config.megatron).world_size if separate else 0
    nodes = Counter((first + i * engine.tensor_parallel) // per_node for i in range(engine.num_engines))
    return {node: engines / engine.num_engines for node, engines in nodes.items()}
