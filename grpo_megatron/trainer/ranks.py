"""RankGroup: starts, calls, puts to sleep and wakes the trainer's processes, one per rank."""

import os
from functools import partial
from typing import Any

import ray

from grpo_megatron.cluster.cpu_threads import openmp_variables
from grpo_megatron.cluster.hang_detector import HangDetector
from grpo_megatron.cluster.placement import Cluster, Slot
from grpo_megatron.cluster.processes import Process
from grpo_megatron.cluster.worker_group import WorkerGroup
from grpo_megatron.config.command import Command
from grpo_megatron.config.schema import Config
from grpo_megatron.megatron.start import start_actor


def _environment(slot: Slot, threads: int = 1) -> dict[str, str]:
    """Return {name: value} of the environment variables that only trainer ranks need.

    Cluster.options adds the variables that all processes of a run need.

    slot: node and device of the rank's process.
    threads: number of torch's intra-op threads, if the rank runs on a CPU.
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
    """The processes of all trainer ranks. Each has an Actor (megatron.actor), whose methods can be called.

    Ranks can sleep, which means that they free their GPU memory. `call` wakes sleeping ranks. But if rollout
    engines use the GPUs while the ranks sleep, `call` raises RuntimeError instead.

    group: the same processes, for calls that must not wake sleeping ranks
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
        """Start one process per rank and wait until all have built their model.

        command: the grpo-megatron command that runs. It decides what the ranks build: a policy, or a reward
            model.
        log_dir: folder of the ranks' log files.
        hang_detector: observes the heartbeats of all ranks.
        takes_turns: True if rollout engines use the ranks' GPUs while the ranks sleep. Sleeping ranks are
            then not woken by calls.
        """
        self.replicas = config.megatron.data_parallel
        self.group = WorkerGroup(
            "trainer rank",
            [
                cluster.options(slot, _environment(slot, cluster.rank_threads.get(slot.node, 1)))
                for slot in cluster.rank_slots
            ],
            [slot.node for slot in cluster.rank_slots],
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
        """Wake the ranks if they sleep, and return their processes.

        If the ranks sleep because rollout engines use the same devices, this method does not wake the ranks,
        but raises RuntimeError.
        """
        if self._asleep and self._takes_turns:
            raise RuntimeError(
                "the trainer's ranks sleep while the rollout engines use the devices that both share; put "
                "the engines to sleep and wake the ranks before this call"
            )
        self.wake()
        return self.group

    def call(self, method: str, args_of_replica: list[tuple]) -> list[Any]:
        """Call a method of the Actor on all ranks. Return one result per data-parallel replica, in order.

        The result of a replica is the return value of one of its ranks, the one for which RankInfo.reports is
        True. Sleeping ranks are woken before the call (see `awake`).

        method: attribute path of the method in the Actor, such as `passes.scores`.
        args_of_replica: for each replica, the arguments of the call. All ranks of the replica get them.
        """
        group = self.awake()
        # Arguments that are the same object for several replicas are stored once.
        stored = {id(args): ray.put(args) for args in {id(args): args for args in args_of_replica}.values()}
        results = group.call_shared(
            method, [stored[id(args_of_replica[rank.dp_rank])] for rank in group.ranks]
        )
        reports = {
            rank.dp_rank: result for rank, result in zip(group.ranks, results, strict=True) if rank.reports
        }
        return [reports[dp] for dp in range(self.replicas)]

    def call_alike(self, method: str, *args) -> None:
        """Call a method of the Actor on all ranks with the same arguments, and discard the results.

        method: attribute path of the method in the Actor, such as `weights.scale`.
        """
        self.call(method, [args] * self.replicas)

    def make_room(self) -> None:
        """Free device memory that a training step has left behind, such as its prepared micro-batches.

        Engines on the same devices need this memory before a weight sync. Call this method only after the
        last training pass of a step: the recorded MoE routing and the reference's hidden states, which
        training passes use, are lost.
        """
        self.awake().call("memory.make_room")

    def sleep(self) -> dict[str, float]:
        """Free the ranks' GPU memory for the rollout engines, until `wake` is called.

        Returns the metrics "memory/rank_awake_gib" and "memory/rank_asleep_gib": the GPU memory, in GiB, of
        the rank that uses most memory, before and after. If the ranks sleep already, or if megatron.sleep is
        off, nothing is freed, and the result is {}. With megatron.sleep off, the ranks nevertheless count as
        asleep until `wake`.
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
        """Restore the GPU memory that `sleep` freed. Do nothing if the ranks are awake."""
        if self._asleep and self._parks:
            self.group.call("memory.wake")
        self._asleep = False

    def occupied(self) -> int:
        """Return the GPU memory, in bytes, of the rank that uses most memory.

        For ranks without a GPU, this is host memory. This method does not wake sleeping ranks.
        """
        return max(self.group.occupied())

    def close(self) -> None:
        self.group.close()
