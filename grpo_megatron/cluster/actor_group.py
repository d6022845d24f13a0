"""The trainer as the controller sees it: all ranks of the Megatron actor behind one object."""

import itertools
import socket
from contextlib import contextmanager

import numpy as np
import ray

from grpo_megatron.batch import Schedule, TrainBatch
from grpo_megatron.cluster.placement import Cluster, Slot
from grpo_megatron.cluster.processes import fetch, gather, redirect_output
from grpo_megatron.megatron.architecture import read_architecture
from grpo_megatron.metrics import Mean, Metrics, Sum, merge


@ray.remote
class RankWorker:
    """One rank in its own process."""

    def __init__(self, log: str):
        redirect_output(log)

    def address(self) -> str:
        """host:port on which rank 0 will listen for the others."""
        with socket.socket() as free:
            free.bind(("", 0))
            return f"{ray.util.get_node_ip_address()}:{free.getsockname()[1]}"

    def start(self, spec, rank: int, address: str, seed: int, threads: int, timeout: float):
        """Join the process groups and build the model; returns RankInfo."""
        import torch

        from grpo_megatron.megatron import parallel
        from grpo_megatron.megatron.actor import Actor

        if not torch.cuda.is_available():
            torch.set_num_threads(threads)
        info = parallel.initialize(spec.sizes, rank, f"tcp://{address}", seed, timeout)
        self.actor = Actor(spec)
        return info

    def call(self, method: str, *args):
        return getattr(self.actor, method)(*args)

    def weight_buckets(self, max_bytes: int):
        yield from self.actor.weight_buckets(max_bytes)


def _environment(slot: Slot, megatron_config) -> dict[str, str]:
    """What must be in a rank's environment before its process starts."""
    if slot.device is not None:
        # Megatron's overlap of communication with compute relies on one hardware queue.
        return {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    return {
        "OMP_NUM_THREADS": str(megatron_config.cpu_threads),
        # Waiting OpenMP threads of one rank would take the cores of the others.
        "OMP_WAIT_POLICY": "passive",
        "TORCHDYNAMO_DISABLE": "1",
    }


class ActorGroup:
    """Every method returns when all ranks are done, and raises if one of them failed."""

    def __init__(self, cluster: Cluster, spec, megatron_config, seed: int, log_dir: str):
        """spec: megatron.actor.ActorSpec; megatron_config: config.schema.MegatronConfig."""
        self.sizes = spec.sizes
        world = spec.sizes.world_size
        self.hidden_size = read_architecture(spec.model_path).hidden_size
        logs = [f"{log_dir}/rank{rank}.log" for rank in range(world)]
        self._who = {rank: (f"trainer rank {rank} of {world}", log) for rank, log in enumerate(logs)}
        self.workers = [
            RankWorker.options(**cluster.options(slot, _environment(slot, megatron_config))).remote(log)
            for slot, log in zip(cluster.rank_slots, logs, strict=True)
        ]
        address = gather({0: self.workers[0].address.remote()}, self._who)[0]
        timeout = megatron_config.collective_timeout
        started = {
            rank: worker.start.remote(spec, rank, address, seed, megatron_config.cpu_threads, timeout)
            for rank, worker in enumerate(self.workers)
        }
        self.ranks = gather(started, self._who)

    def _call(self, method: str, args_of_replica: list[tuple]) -> list:
        """Call on all ranks with the arguments of their replica; the replicas' reports, in order."""
        references = {
            rank: worker.call.remote(method, *args_of_replica[self.ranks[rank].dp_rank])
            for rank, worker in enumerate(self.workers)
        }
        results = gather(references, self._who)
        reporting = sorted((self.ranks[rank].dp_rank, rank) for rank in results if self.ranks[rank].reports)
        return [results[rank] for _, rank in reporting]

    def _call_alike(self, method: str, *args) -> None:
        self._call(method, [args] * self.sizes.dp)

    def _split(self, batch: TrainBatch, plan: Schedule) -> list:
        """Object references to each replica's micro-batches."""
        return [ray.put([batch.select(mb) for mb in plan.micro_batches[dp]]) for dp in range(self.sizes.dp)]

    def logprobs(self, batch: TrainBatch, plan: Schedule, reference: bool = False) -> np.ndarray:
        """float32 [T]: log-prob of every target under the current or the reference weights."""
        parts = self._call("logprobs", [(micro_batches, reference) for micro_batches in self._split(batch, plan)])
        out = np.empty(batch.num_tokens, dtype=np.float32)
        for dp, part in enumerate(parts):
            out[batch.token_index(plan.sequences(dp))] = part
        return out

    def train_step(self, batch: TrainBatch, plan: Schedule, loss, current_is_old: bool = False) -> Metrics:
        """One optimizer step on a mini-batch whose token weights are set; its metrics."""
        parts = self._split(batch, plan)
        results = self._call("train_step", [(mb, loss, batch.num_tokens, current_is_old) for mb in parts])
        metrics = merge([result.metrics for result in results])
        # A sum over micro-batches and ranks, but not over optimizer steps.
        metrics["actor/loss"] = Mean(metrics["actor/loss"].value, 1)
        first = results[0]
        metrics["actor/grad_norm"] = Mean(first.grad_norm, 1)
        metrics["actor/lr"] = Mean(first.lr, 1)
        metrics["actor/dropped_steps"] = Sum(float(first.dropped))
        metrics["actor/optimizer_steps"] = Sum(1.0)
        return metrics

    @contextmanager
    def weight_stream(self, max_bytes: int):
        """Within this context: references to the buckets of all stages, made as they are taken.

        The bytes go from rank to engine; the driver only passes references on. All must be taken. A
        rank that failed is named also where an engine stumbled over its bucket first.
        """
        # Held back to two buckets a rank: else the whole model would lie in the object store.
        options = {"num_returns": "streaming", "_generator_backpressure_num_objects": 2}
        streams = [worker.weight_buckets.options(**options).remote(max_bytes) for worker in self.workers]
        ended = {stream.completed(): rank for rank, stream in enumerate(streams)}
        try:
            yield itertools.chain.from_iterable(streams)
        except Exception:
            ready, _ = ray.wait(list(ended), num_returns=len(ended), timeout=5.0)
            for reference in ready:
                fetch(reference, *self._who[ended[reference]])
            raise
        gather({rank: reference for reference, rank in ended.items()}, self._who)

    def save_hf(self, folder: str) -> None:
        self._call_alike("save_hf", folder)

    def save_checkpoint(self, folder: str) -> None:
        self._call_alike("save_checkpoint", folder)

    def load_checkpoint(self, folder: str) -> None:
        self._call_alike("load_checkpoint", folder)

    def close(self) -> None:
        for worker in self.workers:
            ray.kill(worker)
