"""RankGroup: the processes of the trainer, one per rank, and whether they sleep."""

import os
from functools import partial
from typing import Any

from grpo_megatron.cluster.cpu_threads import openmp_variables
from grpo_megatron.cluster.hang_detector import HangDetector
from grpo_megatron.cluster.placement import Cluster, Slot
from grpo_megatron.cluster.processes import Process
from grpo_megatron.cluster.worker_group import WorkerGroup
from grpo_megatron.config.command import Command
from grpo_megatron.config.schema import Config
from grpo_megatron.megatron.start import start_actor


def _environment(slot: Slot, threads: int = 1) -> dict[str, str]:
    """Return the environment variables that a rank's process must be started with.

    Cluster.options adds those that all processes of a run need.
    threads: intra-op threads of torch, if the rank runs on a CPU.
    """
    if slot.device is not None:
        return {
            # Megatron's overlap of communication with computation relies on one hardware queue.
            "CUDA_DEVICE_MAX_CONNECTIONS": "1",
            # By default torch.compile starts up to 32 processes in each rank: 256 on a node of eight.
            "TORCHINDUCTOR_COMPILE_THREADS": os.environ.get("TORCHINDUCTOR_COMPILE_THREADS", "4"),
        }
    return {
        **openmp_variables(threads),
        "TORCHDYNAMO_DISABLE": "1",
    }


class RankGroup:
    """The processes of all trainer ranks. Each holds a megatron Actor, whose parts are called by path.

    Ranks that sleep are woken by the next call, unless engines use their devices.

    group: the processes, for calls that ranks may answer while they sleep
    """

    def __init__(
        self,
        cluster: Cluster,
        config: Config,
        command: Command,
        log_dir: str,
        hang_detector: HangDetector,
        takes_turns: bool,
    ):
        """Start one process per rank and wait until all have built their model. See PolicyTrainer."""
        self._replicas = config.megatron.data_parallel
        self.group = WorkerGroup(
            "trainer rank",
            [
                cluster.options(slot, _environment(slot, cluster.rank_threads.get(slot.node, 1)))
                for slot in cluster.rank_slots
            ],
            log_dir,
            partial(start_actor, config, command),
            config.cluster.call_timeout,
            hang_detector,
        )
        self._parks, self._takes_turns = config.megatron.sleep, takes_turns
        self._asleep = False

    @property
    def processes(self) -> list[Process]:
        return self.group.processes

    def awake(self) -> WorkerGroup:
        """Return the processes, awake. Raises RuntimeError if they sleep and engines use their devices."""
        if self._asleep and self._takes_turns:
            raise RuntimeError(
                "the trainer's ranks are asleep, because the engines are using the devices that they share"
            )
        self.wake()
        return self.group

    def call(self, method: str, args_of_replica: list[tuple]) -> list[Any]:
        """Call a method of the Actor on all ranks. Return one result per data-parallel replica, in order.

        method: path from the Actor, such as `passes.logprobs`.
        args_of_replica: arguments for the ranks of each replica.
        """
        group = self.awake()
        results = group.call(method, [args_of_replica[rank.dp_rank] for rank in group.ranks])
        reports = {
            rank.dp_rank: result for rank, result in zip(group.ranks, results, strict=True) if rank.reports
        }
        return [reports[dp] for dp in range(self._replicas)]

    def call_alike(self, method: str, *args) -> None:
        """Call a method of the Actor on all ranks with the same arguments."""
        self.call(method, [args] * self._replicas)

    def make_room(self) -> None:
        """Free the memory that the ranks can rebuild, such as the finished step's micro-batches."""
        self.awake().call("memory.make_room")

    def sleep(self) -> dict[str, float]:
        """Free the ranks' GPU memory for the rollout engines, until `wake`. Needs megatron.sleep.

        Returns two metrics: the GiB that the fullest rank occupies awake, and asleep. Returns an empty dict
        if the ranks sleep already, or if megatron.sleep is off.
        """
        if self._asleep:
            return {}
        self._asleep = True
        if not self._parks:
            return {}
        reports = self.group.call("memory.sleep")
        return {
            f"memory/rank_{state}_gib": max(report[when]["occupied"] for report in reports) / 2**30
            for state, when in (("awake", "before"), ("asleep", "asleep"))
        }

    def wake(self) -> None:
        """Undo `sleep`. Do nothing if the ranks are awake."""
        if self._asleep and self._parks:
            self.group.call("memory.wake")
        self._asleep = False

    def occupied(self) -> int:
        """Return the GPU bytes (without a GPU: host bytes) of the fullest rank. Does not wake the ranks."""
        return max(self.group.occupied())

    def close(self) -> None:
        self.group.close()
