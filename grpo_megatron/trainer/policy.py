"""The trainer as the controller sees it: all ranks of the Megatron actor behind one object."""

import gc
import itertools
import math
import os
import socket
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import numpy as np
import ray

from grpo_megatron.batch.schedule import Schedule
from grpo_megatron.batch.train_batch import TrainBatch
from grpo_megatron.cluster.placement import Cluster, Slot
from grpo_megatron.cluster.processes import fetch, gather, redirect_output
from grpo_megatron.errors import UserError
from grpo_megatron.metrics import Mean, Metrics, Sum, merge
from grpo_megatron.model.architecture import read_architecture


def _step_behind() -> None:
    """Let this thread run on one core and, where the system can, only when no other process of the job wants it."""
    import torch

    torch.set_num_threads(1)  # this thread's own number
    if sys.platform == "linux":  # where a priority can be that of a thread
        with suppress(OSError):  # some sandboxes know one class of priority only; a pass then takes its share
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


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

        from grpo_megatron.megatron import process_groups
        from grpo_megatron.megatron.actor import Actor

        if not torch.cuda.is_available():
            torch.set_num_threads(threads)
        info = process_groups.initialize(spec.sizes, rank, f"tcp://{address}", seed, timeout)
        self.actor = Actor(spec)
        self._behind = ThreadPoolExecutor(1, initializer=_step_behind)
        gc.freeze()  # what was imported stays; no collection need walk through it
        return info

    def call(self, method: str, *args):
        return getattr(self.actor, method)(*args)

    def call_beside_engines(self, method: str, *args):
        """As `call`, while engines generate: without a GPU, on one core, when nothing else wants it."""
        import torch

        if torch.cuda.is_available():
            return self.call(method, *args)
        return self._behind.submit(self.call, method, *args).result()

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
        # But for some microseconds: small operators follow each other faster than a thread wakes. A tenth of a step.
        "GOMP_SPINCOUNT": "1000",
        "TORCHDYNAMO_DISABLE": "1",
    }


class DroppedSteps:
    """Watches for optimizer steps that are dropped one after the other, and stops the run if there are too many."""

    def __init__(self, config):
        """config: config.schema.OptimizerConfig."""
        self._config = config
        self._in_a_row: list[tuple[float, float]] = []
        self._beyond: tuple[str, ...] = ()

    def note(self, dropped: bool, grad_norm: float, loss: float, step: int | None, beyond: tuple[str, ...] = ()) -> None:
        """After every optimizer step; step: of the run, if known; beyond: see spec.TrainResult.

        Raises UserError at the optimizer.max_dropped_steps-th dropped one in a row.
        """
        if not dropped:
            self._in_a_row.clear()
            self._beyond = ()
            return
        self._in_a_row.append((grad_norm, loss))
        self._beyond = beyond or self._beyond
        if len(self._in_a_row) < self._config.max_dropped_steps:
            return
        norms, losses = (", ".join(f"{value:.4g}" for value in values) for values in zip(*self._in_a_row, strict=True))
        reasons = []
        if not all(math.isfinite(norm) for norm, _ in self._in_a_row):
            reasons.append(
                "A norm that is not finite comes from NaN or infinity in the weights, the log-probs or the advantages: look at "
                "actor/loss, actor/grad_norm and mismatch/max of the steps before in metrics.jsonl; a lower optimizer.lr may help."
            )
        if self._beyond:
            reasons.append(f"The reason was not the gradient, but: {self._beyond[0]}.")
        elif any(math.isfinite(norm) for norm, _ in self._in_a_row):
            limit = self._config.max_grad_norm_to_step
            reasons.append(
                f"A finite norm was more than optimizer.max_grad_norm_to_step={limit}: look at actor/grad_norm of good steps in "
                "metrics.jsonl, whether the limit is too low or training diverges."
            )
        raise UserError(
            f"{len(self._in_a_row)} optimizer steps in a row were dropped"
            + ("" if step is None else f", the last one in step {step}")
            + f" (optimizer.max_dropped_steps={self._config.max_dropped_steps}); gradient norms {norms}, losses {losses}. "
            + " ".join(reasons)
        )


def _in_order(batch: TrainBatch, plan: Schedule, parts: list[np.ndarray]) -> np.ndarray:
    """The replicas' values [..., t] of their tokens, as [..., T] in the order of the batch."""
    out = np.empty((*parts[0].shape[:-1], batch.num_tokens), dtype=np.float32)
    for dp, part in enumerate(parts):
        out[..., batch.token_index(plan.sequences(dp))] = part
    return out


@dataclass(frozen=True)
class PendingLogprobs:
    """Of `ActorGroup.start_logprobs`. result: waits for it, float32 [T]; raises as the ranks do."""

    references: list
    result: Callable[[], np.ndarray]

    def ready(self) -> bool:
        """Whether `result` would not wait."""
        return len(ray.wait(self.references, num_returns=len(self.references), timeout=0)[0]) == len(self.references)


class ActorGroup:
    """Every method returns when all ranks are done, and raises if one of them failed."""

    def __init__(self, cluster: Cluster, spec, megatron_config, seed: int, log_dir: str):
        """spec: megatron.actor.ActorSpec; megatron_config: config.schema.MegatronConfig."""
        self.sizes = spec.sizes
        self._dropped_steps = DroppedSteps(spec.optimizer)
        world = spec.sizes.world_size
        self.cost_model = read_architecture(spec.model_path).cost_model
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
        self._asleep = False

    def _call(self, method: str, args_of_replica: list[tuple]) -> list:
        """Call on all ranks with the arguments of their replica; the replicas' reports, in order."""
        return self._finish(self._start("call", method, args_of_replica))

    def _start(self, call: str, method: str, args_of_replica: list[tuple]) -> dict:
        """{rank: reference}; call: `call` or `call_beside_engines` of RankWorker."""
        self._wake()
        return {
            rank: getattr(worker, call).remote(method, *args_of_replica[self.ranks[rank].dp_rank])
            for rank, worker in enumerate(self.workers)
        }

    def _finish(self, references: dict) -> list:
        results = gather(references, self._who)
        reporting = sorted((self.ranks[rank].dp_rank, rank) for rank in results if self.ranks[rank].reports)
        return [results[rank] for _, rank in reporting]

    def _call_alike(self, method: str, *args) -> None:
        self._call(method, [args] * self.sizes.dp)

    def _call_each(self, method: str) -> dict:
        """Call on all ranks; {rank: result}."""
        return gather({rank: worker.call.remote(method) for rank, worker in enumerate(self.workers)}, self._who)

    def sleep(self) -> dict[str, float]:
        """Give back the ranks' memory until the next call of any other method, which wakes them first.

        Returns metrics: GiB that the fullest rank occupies awake and asleep; none if already asleep.
        """
        if self._asleep:
            return {}
        reports = self._call_each("sleep").values()
        self._asleep = True
        return {
            f"memory/rank_{state}_gib": max(report[when]["occupied"] for report in reports) / 2**30
            for state, when in (("awake", "before"), ("asleep", "asleep"))
        }

    def _wake(self) -> None:
        if self._asleep:
            self._call_each("wake")
            self._asleep = False

    def _split(self, batch: TrainBatch, plan: Schedule) -> list:
        """Object references to each replica's micro-batches."""
        return [ray.put([batch.select(mb) for mb in plan.micro_batches[dp]]) for dp in range(self.sizes.dp)]

    def logprobs(
        self,
        batch: TrainBatch,
        plan: Schedule,
        reference: bool = False,
        key: tuple[int, int] | None = None,
        keep_hidden: bool = False,
    ) -> np.ndarray:
        """float32 [T]: log-prob of every target under the current or the reference weights.

        key: (step, number of the mini-batch), by which ranks reuse what they keep between passes.
        keep_hidden: the reference's hidden states stay on the ranks, for the exact KL.
        """
        arguments = [(micro_batches, reference, key, keep_hidden) for micro_batches in self._split(batch, plan)]
        return _in_order(batch, plan, self._call("logprobs", arguments))

    def start_logprobs(self, batch: TrainBatch, plan: Schedule, reference: bool) -> PendingLogprobs:
        """As `logprobs`, while engines generate and the caller goes on."""
        arguments = [(micro_batches, reference) for micro_batches in self._split(batch, plan)]
        references = self._start("call_beside_engines", "logprobs", arguments)
        return PendingLogprobs(list(references.values()), lambda: _in_order(batch, plan, self._finish(references)))

    def probe(self, batch: TrainBatch, plan: Schedule, temperature: float, rounding=None) -> np.ndarray:
        """float32 [2, T]: log-prob of every target and entropy, see `Actor.probe`. rounding: a torch.dtype or None."""
        arguments = [(micro_batches, temperature, rounding) for micro_batches in self._split(batch, plan)]
        return _in_order(batch, plan, self._call("probe", arguments))

    def scale_weights(self, factor: float) -> None:
        self._call_alike("scale_weights", factor)

    def train_step(
        self, batch: TrainBatch, plan: Schedule, loss, current_is_old: bool = False, key: tuple[int, int] | None = None
    ) -> Metrics:
        """One optimizer step on a mini-batch whose token weights are set; its metrics.

        Raises UserError where it is one dropped step too many, see DroppedSteps.
        """
        parts = self._split(batch, plan)
        # Adam would move the weights without a gradient too.
        untrained = () if batch.weight.any() else ("no token has a weight in the loss",)
        results = self._call("train_step", [(mb, loss, batch.num_tokens, current_is_old, key, bool(untrained)) for mb in parts])
        metrics = merge([result.metrics for result in results])
        # A sum over micro-batches and ranks, but not over optimizer steps.
        metrics["actor/loss"] = Mean(metrics["actor/loss"].value, 1)
        first = results[0]
        step = key[0] if key else None
        self._dropped_steps.note(
            first.dropped, first.grad_norm, metrics["actor/loss"].result(), step, first.beyond or untrained
        )
        if loss.limits:
            metrics["actor/steps_beyond_limit"] = Sum(float(bool(first.beyond)))
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
        self._wake()
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

    def reset_reference(self) -> None:
        """The current weights become the reference."""
        self._call_alike("reset_reference")

    def save_hf(self, folder: str) -> None:
        self._call_alike("save_hf", folder)

    def save_checkpoint(self, folder: str) -> None:
        self._call_alike("save_checkpoint", folder)

    def load_checkpoint(self, folder: str) -> None:
        self._call_alike("load_checkpoint", folder)

    def close(self) -> None:
        for worker in self.workers:
            ray.kill(worker)
