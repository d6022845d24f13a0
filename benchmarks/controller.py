"""Measure what a step costs the driver of a large run: CPU time, memory, and the bytes that it moves.

    python benchmarks/controller.py [--sequences N] [--tokens N] [--replicas N] [--ranks-of-node N]
        [--mini-batches N] [--steps N]

The controller, rollout manager, rollout worker, trainer, monitor and ledger are the real ones. So is the
driver's part of a call to the 32 ranks of each replica, which takes one Ray call for each node, to its
forwarder. Forwarders and ranks are not real: a few processes answer for all of them immediately. The worker
makes the samples without engines, so it answers immediately, too. All sequences have the given number of
tokens, 256 of them in the prompt. All is measured with a quarter of the tokens as well.

The figures are CPU seconds of the driver's process, medians of the steps after the first. Prints a table and,
as its last line, one JSON object:

    driver_seconds         seconds of the trainer's part of a step (log-probs, coefficients, training); target
                           1.5
    step_seconds           seconds of a whole step; target 3
    growth                 step_seconds with all tokens / with a quarter of them; target 1.1
    driver_gib             largest memory of the driver beyond that before the first step, in GiB; target 0.25
    bytes_per_sequence     bytes that enter or leave the driver in a step, for each sequence; target 512
    shipped_over_needed    tokens that replicas are sent / tokens of the step; target 1
"""

import argparse
import importlib
import json
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import ray

from grpo_megatron.algorithm.algorithm import Algorithm
from grpo_megatron.batch.prompt import Prompt
from grpo_megatron.batch.sample import Sample
from grpo_megatron.batch.schedule import CostModel
from grpo_megatron.batch.sums import SequenceSums
from grpo_megatron.cluster.forwarder import Forwarder
from grpo_megatron.cluster.hang_detector import HangDetector
from grpo_megatron.cluster.pool_worker import Place
from grpo_megatron.cluster.processes import ForwardedAnswer, Process
from grpo_megatron.cluster.ray_connection import connect
from grpo_megatron.cluster.rounds import RoundId
from grpo_megatron.cluster.worker_group import WorkerGroup
from grpo_megatron.config.load import read_config
from grpo_megatron.config.schema import Config
from grpo_megatron.controller import Controller
from grpo_megatron.megatron.results import Measurement, TrainResult
from grpo_megatron.metrics import Max, Mean, Sum, Top
from grpo_megatron.model.parallel_sizes import ParallelSizes
from grpo_megatron.monitoring.monitor import Monitor
from grpo_megatron.monitoring.status import StatusFile
from grpo_megatron.monitoring.throughput import Throughput
from grpo_megatron.rollout.groups import GroupRequest, Round
from grpo_megatron.rollout.manager import RolloutManager
from grpo_megatron.rollout.played_group import Listener
from grpo_megatron.rollout.source import EngineRollouts
from grpo_megatron.rollout.worker import RolloutWorker
from grpo_megatron.run.loop import StepLoop
from grpo_megatron.samples.ledger import Ledger
from grpo_megatron.sglang.admission import Admission, Closed
from grpo_megatron.trainer.optimizer_steps import OptimizerSteps
from grpo_megatron.trainer.policy import PolicyTrainer
from grpo_megatron.trainer.ranks import RankGroup

# Other processes import the classes of this file under this name, not as __main__.
MODULE = "benchmarks.controller"
GROUP, PROMPT, RANKS_OF_REPLICA = 8, 256, 32
# Number of processes that answer for the forwarders.
PROCESSES = 2


class InstantSampler:
    """Stands in for the GroupSampler of a rollout worker. It makes samples immediately, without engines.

    tokens: number of tokens of each sample, including the prompt.
    """

    def __init__(self, tokens: int):
        self._tokens = tokens

    async def begin(self, round: Round) -> None: ...

    async def end(self, round: RoundId) -> None: ...

    def close(self) -> None: ...

    async def sample(self, round: RoundId, request: GroupRequest, listener: Listener) -> tuple[Sample, ...]:
        length = self._tokens - len(request.prompt.ids)
        rewards = np.random.default_rng(request.group_id).integers(0, 2, GROUP)
        return tuple(
            Sample.of(
                request.group_id,
                request.group_id * GROUP + member,
                request.prompt.ids,
                np.ones(length, np.int32),
                np.ones(length, bool),
                np.zeros(length, np.float32),
                "stop",
                reward=float(reward),
            )
            for member, reward in enumerate(rewards)
        )


class SamplerOf:
    """Function that the driver sends to a rollout worker's process, where it builds an InstantSampler."""

    def __init__(self, tokens: int):
        self._tokens = tokens

    def __call__(self):
        return importlib.import_module(MODULE).InstantSampler(self._tokens)


@ray.remote
class Answers:
    """Process that answers immediately in place of many forwarders and their ranks."""

    def call(self, method: str, arguments: dict[int, tuple], timeout: float) -> ForwardedAnswer:
        """Answer a call to a forwarder. One rank of each replica returns a made-up result, the others None.

        arguments: {rank: arguments of the call to this rank}. method and timeout are not used.
        """
        results = {
            rank: None if rank % RANKS_OF_REPLICA else self._answer(*own) for rank, own in arguments.items()
        }
        return ForwardedAnswer(results, others={})

    def _answer(self, method: str, reference: ray.ObjectRef):
        arguments = ray.get(reference)
        if method == "mini_batches.measure":
            return {
                key: self._measured([sample for part in parts for sample in part])
                for key, parts in arguments[0].items()
            }
        metrics = {"actor/loss": Sum(0.0), "actor/entropy": Mean(1.0, 1.0), "mismatch/max": Max(0.0)}
        return TrainResult(1.0, 1e-6, False, metrics | {"mismatch/worst": Top([])})

    def _measured(self, samples: list[Sample]) -> Measurement:
        trained = np.array([sample.num_trained for sample in samples], dtype=np.float64)
        zeros = np.zeros(len(samples))
        return Measurement(SequenceSums(trained, trained, zeros, zeros, zeros), {}, False)


class Traffic:
    """Counts what enters or leaves the driver, while `is_on` is True.

    bytes: number of bytes, as Ray serialises them
    shipped_tokens: number of tokens of the samples that were sent to the ranks
    """

    def __init__(self):
        self.is_on, self.bytes, self.shipped_tokens = False, 0, 0

    def count(self, value) -> None:
        if self.is_on:
            # Use Ray's own pickler, because a pickled reference includes the address of its owner.
            context = ray._private.worker.global_worker.get_serialization_context()
            self.bytes += context.serialize(value).total_bytes


class Node(Forwarder):
    """The driver's handle of the forwarder of one node. An Answers actor answers its calls."""

    def __init__(self, ranks: range, actor: ray.actor.ActorHandle):
        self._process, self._ranks = Process(f"forwarder of rank {ranks[0]}", ""), tuple(ranks)
        self._actor = actor


class Group(WorkerGroup):
    """The driver's handle of all ranks. The processes of ranks and forwarders do not exist."""

    def __init__(self, replicas: int, ranks_of_node: int):
        actors, numbers = [Answers.remote() for _ in range(PROCESSES)], range(replicas * RANKS_OF_REPLICA)
        self.ranks = [
            SimpleNamespace(dp_rank=rank // RANKS_OF_REPLICA, reports=rank % RANKS_OF_REPLICA == 0)
            for rank in numbers
        ]
        self.processes = [Process(f"rank {rank}", "") for rank in numbers]
        self._forwarders = [
            Node(numbers[first : first + ranks_of_node], actors[index % PROCESSES])
            for index, first in enumerate(numbers[::ranks_of_node])
        ]
        self._called_directly, self._timeout = [], 600.0


class Ranks(RankGroup):
    """The ranks. `traffic` counts the arguments and results of their calls."""

    def __init__(self, replicas: int, ranks_of_node: int, traffic: Traffic):
        self.replicas, self._traffic, self.group = replicas, traffic, Group(replicas, ranks_of_node)
        self._parks = self._takes_turns = self._asleep = False

    def call(self, method: str, args_of_replica: list[tuple]) -> list:
        results = super().call(method, args_of_replica)
        for arguments, result in zip(args_of_replica, results, strict=True):
            self._traffic.count((arguments, result))
        if self._traffic.is_on and method == "mini_batches.measure":
            parts = [part for own, _ in args_of_replica for parts in own.values() for part in parts]
            self._traffic.shipped_tokens += sum(sample.num_tokens for part in parts for sample in part)
        return results


class Trainer(PolicyTrainer):
    """The driver's handle on the trainer, with ranks that compute nothing."""

    def __init__(self, config: Config, ranks: Ranks):
        self.sizes, self.ranks = ParallelSizes.from_config(config.megatron), ranks
        self.cost_model = CostModel()
        self._steps = OptimizerSteps(config.optimizer, SimpleNamespace())
        self._epochs, self._reset_every = config.train.ppo_epochs, config.ref.reset_every


class Rollouts:
    """Stands in for RolloutPipeline, which has nothing to do without engines."""

    version, metrics = 0, {}

    def __init__(self, source: EngineRollouts):
        self._source = source

    def take(self, step: int):
        return self._source.take(step)

    def weights_changed(self) -> None: ...


class Prompts:
    """Stands in for PromptSource. Hands out any number of equal prompts."""

    def next(self, count: int) -> list[Prompt]:
        return [Prompt(uid, np.arange(PROMPT, dtype=np.int32), "", "") for uid in range(count)]

    def settle(self, prompts) -> None: ...

    def take_back(self, prompts) -> None: ...


class Clock:
    """Measures the CPU seconds that this process spends in the trainer's part of a step.

    seconds: sum over the calls so far. The benchmark sets it to 0 before each step.
    """

    def __init__(self, trainer: PolicyTrainer, algorithm: Algorithm):
        self.seconds = 0.0
        for owner, name in ((trainer, "measure"), (trainer, "train"), (algorithm, "coefficients")):
            setattr(owner, name, self._timed(getattr(owner, name)))

    def _timed(self, method):
        def call(*arguments):
            start = time.process_time()
            try:
                return method(*arguments)
            finally:
                self.seconds += time.process_time() - start

        return call


def configured(options: argparse.Namespace, tokens: int) -> Config:
    config = read_config(
        None,
        [
            "model.path=m",
            "data.train=d",
            f"rollout.n={GROUP}",
            f"data.train_batch_size={options.sequences // GROUP}",
            f"rollout.max_response_length={tokens}",
            f"data.max_prompt_length={PROMPT}",
            f"train.max_tokens_per_micro_batch={tokens}",
            "train.old_logprobs=recompute",
            f"train.ppo_mini_batch_size={options.sequences // GROUP // options.mini_batches}",
            f"megatron.data_parallel={options.replicas}",
            "megatron.tensor_parallel=8",
            "megatron.pipeline_parallel=4",
        ],
    )
    return replace(config, monitor=replace(config.monitor, samples_every=0))


def steps(options: argparse.Namespace, tokens: int, folder: str) -> dict[str, float]:
    """Run steps with sequences of `tokens` tokens, and return their figures (see the module docstring)."""
    config, traffic = configured(options, tokens), Traffic()
    place = Place(Process("worker", f"{folder}/worker{tokens}.log"), ray.get_runtime_context().get_node_id())
    worker = RolloutWorker(
        place, importlib.import_module(MODULE).SamplerOf(tokens), HangDetector(folder, 600)
    )
    ray.get(worker.started)
    received = worker.sample

    async def counted(round: RoundId, request: GroupRequest, listener: Listener):
        samples = await received(round, request, listener)
        traffic.count((request, samples))
        return samples

    worker.sample = counted
    engines = SimpleNamespace(weight_version=0, end_ids=frozenset(), admission=Admission(), serving={0: 0})
    engines.admission.open(Closed.unsynced)
    Path(folder, str(tokens)).mkdir()
    with StatusFile(f"{folder}/{tokens}", "run", options.steps) as status:
        throughput = Throughput(CostModel(), options.replicas * RANKS_OF_REPLICA, engine_devices=1)
        monitor = Monitor(f"{folder}/{tokens}", config, status, throughput=throughput)
        monitor.open()
        trainer = Trainer(config, Ranks(options.replicas, options.ranks_of_node, traffic))
        algorithm = Algorithm(config)
        source = EngineRollouts(RolloutManager(engines, [worker]), config, Prompts())
        loop, ledger = StepLoop(config, SimpleNamespace(), monitor), Ledger(f"{folder}/{tokens}")
        controller = Controller(config, Rollouts(source), trainer, algorithm, monitor, loop, ledger)
        clock, process = Clock(trainer, algorithm), psutil.Process()
        before, memory, found = process.memory_info().rss, 0, []
        for step in range(1, options.steps + 3):
            traffic.is_on = step == options.steps + 2
            clock.seconds, start = 0.0, time.process_time()
            controller.train_step(controller.loop.begin_step())
            found.append((clock.seconds, time.process_time() - start))
            memory = max(memory, process.memory_info().rss - before)
        monitor.close()
    worker.close()
    timed = found[1:-1]
    return {
        "driver_seconds": statistics.median(of_trainer for of_trainer, _ in timed),
        "step_seconds": statistics.median(whole for _, whole in timed),
        "driver_gib": memory / 2**30,
        "bytes_per_sequence": traffic.bytes / options.sequences,
        "shipped_over_needed": traffic.shipped_tokens / (options.sequences * tokens),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sequences", type=int, default=8192, help="sequences of a step")
    parser.add_argument("--tokens", type=int, default=16384, help="tokens of each sequence")
    parser.add_argument("--replicas", type=int, default=32, help="data-parallel replicas, of 32 ranks each")
    parser.add_argument("--ranks-of-node", type=int, default=8, help="ranks on each node")
    parser.add_argument("--mini-batches", type=int, default=1, help="mini-batches of a step")
    parser.add_argument("--steps", type=int, default=3, help="timed steps")
    options = parser.parse_args()
    sys.path.insert(0, "")
    connect(None, PROCESSES + 1)
    with tempfile.TemporaryDirectory() as folder:
        quarter, whole = (steps(options, tokens, folder) for tokens in (options.tokens // 4, options.tokens))
    print(f"{'':<24}{options.tokens // 4:>12} tokens{options.tokens:>12} tokens")
    for name, value in whole.items():
        print(f"{name:<24}{quarter[name]:>19.4g}{value:>19.4g}")
    whole["growth"] = whole["step_seconds"] / quarter["step_seconds"]
    print(json.dumps({name: round(value, 4) for name, value in whole.items()}))


if __name__ == "__main__":
    main()
