"""A weight sync into real engines from a trainer of one rank, whose weights are given as HF tensors."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import ray
import torch

from grpo_megatron.cluster.processes import Calls, Process
from grpo_megatron.config.weight_sync import WeightSyncConfig
from grpo_megatron.model.entries import EngineLayout
from grpo_megatron.model.families import read_architecture
from grpo_megatron.model.parallel_sizes import ParallelSizes
from grpo_megatron.sglang.pool import EnginePool
from grpo_megatron.weights.sync.messages import SyncCommand, SyncReport
from grpo_megatron.weights.sync.plan import Layouts, ReshardPlan
from grpo_megatron.weights.sync.resharding import Resharding
from grpo_megatron.weights.sync.sender import WeightSender, sender_for
from grpo_megatron.weights.sync.sync import WeightSync
from tests.unit.sync_cluster import trainer_parameters


@ray.remote(num_cpus=0)
class _Rank:
    def __init__(self, parameters: dict[str, torch.Tensor]):
        self._parameters = parameters
        self._sender: WeightSender | None = None

    def send_weights(self, command: SyncCommand) -> SyncReport:
        self._sender = sender_for(command.setup, self._sender, 0, torch.device("cpu"), False)
        return self._sender.send(command, self._parameters)


class _OneRank:
    """A WeightSource of one rank in a process of its own."""

    processes = (Process("trainer rank 0 of 1", ""),)

    def __init__(self, parameters: dict[str, torch.Tensor]):
        environment = {"env_vars": {"PYTHONPATH": os.getcwd()}}
        self._rank = _Rank.options(runtime_env=environment).remote(parameters)

    def send_weights(self, command: SyncCommand) -> Calls:
        return Calls({0: self._rank.send_weights.remote(command)})

    def close(self) -> None:
        ray.kill(self._rank)


@contextmanager
def sync_from(
    model: str, tensors: dict[str, torch.Tensor], engines: EnginePool, bucket_bytes: int = 20_000
) -> Iterator[WeightSync]:
    """Yield a weight sync that sends these HF tensors to the engines.

    model: folder of the model's config.json.
    """
    layouts = Layouts(
        read_architecture(model),
        ParallelSizes(),
        EngineLayout.from_config(engines._config.engine),
        len(engines.processes),
    )
    source = _OneRank(trainer_parameters(ReshardPlan(layouts), tensors)[0])
    config = WeightSyncConfig(bucket_bytes=bucket_bytes, timeout=60.0)
    sync = WeightSync(source, engines, Resharding(layouts, config, folder="", call_timeout=60.0))
    try:
        yield sync
    finally:
        sync.close()
        source.close()
