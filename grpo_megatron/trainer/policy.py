"""PolicyTrainer: the driver's interface to all trainer ranks, each of which runs a megatron Actor."""

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from math import isfinite
from typing import Any

import numpy as np
import ray
import torch

from grpo_megatron.algorithm.losses import TokenLoss
from grpo_megatron.algorithm.preferences import PreferenceLoss
from grpo_megatron.batch.schedule import Schedule
from grpo_megatron.batch.train_batch import TrainBatch
from grpo_megatron.cluster.cpu_threads import openmp_variables
from grpo_megatron.cluster.hang_detector import HangDetector
from grpo_megatron.cluster.placement import Cluster, Slot
from grpo_megatron.cluster.processes import Process
from grpo_megatron.cluster.worker_group import WorkerGroup
from grpo_megatron.config.schema import MegatronConfig
from grpo_megatron.errors import UserError
from grpo_megatron.megatron.spec import ActorSpec
from grpo_megatron.megatron.start import start_actor
from grpo_megatron.metrics import Max, Mean, Metrics, Sum, merge
from grpo_megatron.model.families import read_architecture
from grpo_megatron.run.checkpoints import SaveReport
from grpo_megatron.run.manifest import FileRecord
from grpo_megatron.trainer.dropped_steps import DroppedSteps
from grpo_megatron.weights.sync.order import Order


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


def _in_order(batch: TrainBatch, plan: Schedule, parts: list[np.ndarray]) -> np.ndarray:
    """Join the results of all data-parallel replicas, in the order of the batch's tokens.

    parts: one array [..., t] per replica, with one value per token of this replica's micro-batches.
    Returns float32 [..., T], with T = batch.num_tokens.
    """
    out = np.empty((*parts[0].shape[:-1], batch.num_tokens), dtype=np.float32)
    for dp, part in enumerate(parts):
        out[..., batch.token_index(plan.sequences(dp))] = part
    return out


class PolicyTrainer:
    """Driver-side handle of all trainer ranks: starts them and calls each method on every rank.

    Except for `sync_order` and `weight_stream`, a method returns when all ranks are done. It raises if a rank
    failed.
    """

    def __init__(
        self,
        cluster: Cluster,
        spec: ActorSpec,
        config: MegatronConfig,
        seed: int,
        log_dir: str,
        timeout: float,
        hang_detector: HangDetector,
        takes_turns: bool = False,
    ):
        """Start one process per rank and wait until all have built their model.

        spec: what every rank builds: model, optimizer, parallel layout.
        seed: seed of the ranks' random number generators.
        log_dir: folder of the ranks' log files.
        timeout: most seconds that one call to the ranks may take.
        hang_detector: hang detector, which observes all ranks.
        takes_turns: True: rollout engines use the ranks' GPUs while the ranks sleep. A call to sleeping ranks
            then raises RuntimeError. Otherwise it wakes them.
        """
        self.sizes = spec.sizes
        self.nodes = tuple(slot.node for slot in cluster.rank_slots)
        self.cost_model = read_architecture(spec.model_path, reward_model=spec.scalar_head).cost_model
        self._dropped_steps = DroppedSteps(spec.optimizer)
        self._last_step: int | None = None  # last step of the run in which the weights changed
        self.group = WorkerGroup(
            "trainer rank",
            [
                cluster.options(slot, _environment(slot, cluster.rank_threads.get(slot.node, 1)))
                for slot in cluster.rank_slots
            ],
            log_dir,
            partial(start_actor, spec, seed, config.collective_timeout),
            timeout,
            hang_detector,
        )
        self._parks, self._takes_turns = config.sleep, takes_turns
        self._asleep = False

    def _call(self, method: str, args_of_replica: list[tuple]) -> list[Any]:
        """Call a method of Actor on all ranks. Return one result per data-parallel replica, in their order.

        args_of_replica: arguments for the ranks of each replica.
        """
        self._must_be_awake()
        ranks = self.group.ranks
        results = self.group.call(method, [args_of_replica[rank.dp_rank] for rank in ranks])
        reports = {rank.dp_rank: result for rank, result in zip(ranks, results, strict=True) if rank.reports}
        return [reports[dp] for dp in range(self.sizes.dp)]

    def _call_alike(self, method: str, *args) -> None:
        self._call(method, [args] * self.sizes.dp)

    def make_room(self) -> None:
        """Free the memory that the ranks can rebuild, such as the finished step's micro-batches."""
        self._must_be_awake()
        self.group.call("make_room")

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
        reports = self.group.call("sleep")
        return {
            f"memory/rank_{state}_gib": max(report[when]["occupied"] for report in reports) / 2**30
            for state, when in (("awake", "before"), ("asleep", "asleep"))
        }

    def wake(self) -> None:
        """Undo `sleep`. Do nothing if the ranks are awake."""
        if self._asleep and self._parks:
            self.group.call("wake")
        self._asleep = False

    def occupied(self) -> int:
        """Return the GPU bytes (without a GPU: host bytes) of the fullest rank. Does not wake the ranks."""
        return max(self.group.occupied())

    def _must_be_awake(self) -> None:
        """Wake the ranks. Raises RuntimeError instead if engines are using the devices of sleeping ranks."""
        if self._asleep and self._takes_turns:
            raise RuntimeError("the trainer's ranks sleep: it is the turn of the engines on their devices")
        self.wake()

    def _split(self, batch: TrainBatch, plan: Schedule) -> list:
        """Put each replica's micro-batches into Ray's object store. Return one reference per replica."""
        return [ray.put([batch.select(mb) for mb in plan.micro_batches[dp]]) for dp in range(self.sizes.dp)]

    @contextmanager
    def reference(self) -> Iterator[None]:
        """Exchange the policy's weights for those of the reference model within the context.

        Only `logprobs(reference=True)` may be called inside. Entering and leaving copy all weights, so open
        one context for all mini-batches of a step.
        """
        self._call_alike("begin_reference")
        yield
        self._call_alike("end_reference")  # not after an error: the ranks may hang in a collective

    def logprobs(
        self,
        batch: TrainBatch,
        plan: Schedule,
        reference: bool = False,
        key: tuple[int, int] | None = None,
        keep_hidden: bool = False,
    ) -> np.ndarray:
        """Return the log-prob of every target token, float32 [T], in the order of the batch.

        reference: use the reference model's weights, not the policy's. Only within the context `reference()`.
        key: MiniBatch.key. With it, ranks reuse prepared inputs in later passes over the same mini-batch.
        keep_hidden: with `reference`, keep the reference's last hidden states on the ranks. The training pass
            computes the exact KL from them.
        """
        arguments = [
            (micro_batches, reference, key, keep_hidden) for micro_batches in self._split(batch, plan)
        ]
        return self._checked(_in_order(batch, plan, self._call("logprobs", arguments)))

    def scores(self, batch: TrainBatch, plan: Schedule) -> np.ndarray:
        """Return the reward model's score of every sequence, float32 [S].

        When a reward model is trained, it computes the scores. When a policy is trained, the frozen reward
        model on the same ranks does.
        """
        parts = self._call("scores", [(micro_batches,) for micro_batches in self._split(batch, plan)])
        out = np.empty(batch.num_sequences, dtype=np.float32)
        for dp, part in enumerate(parts):
            out[plan.sequences(dp)] = part
        return self._checked(out)

    def probe(
        self, batch: TrainBatch, plan: Schedule, temperature: float, rounding: torch.dtype | None = None
    ) -> np.ndarray:
        """Return log-prob and entropy of every target, float32 [2, T], to compare trainer and engines.

        temperature: divides the logits, in place of the configured temperature.
        rounding: add rounding errors of this dtype after every layer, to measure their effect. None: add
            none.
        """
        arguments = [(micro_batches, temperature, rounding) for micro_batches in self._split(batch, plan)]
        return self._checked(_in_order(batch, plan, self._call("probe", arguments)))

    def _checked(self, values: np.ndarray) -> np.ndarray:
        """Return the values. If they contain NaN, check the weights: UserError if these are not finite."""
        if np.isnan(values).any():
            self.must_be_finite()
        return values

    def must_be_finite(self) -> None:
        """Raise UserError if any weight is NaN or infinite, because training does not recover from that."""
        self._must_be_awake()
        found = dict(zip(self.processes, self.group.call("broken_weights"), strict=True))
        broken = [(process.name, name) for process, names in found.items() for name in names]
        if broken:
            since = (
                "since they were loaded"
                if self._last_step is None
                else f"since the optimizer step of step {self._last_step}"
            )
            raise UserError(
                f"{len(broken)} parameters hold NaN or infinity {since}, such as {broken[0][1]} on "
                f"{broken[0][0]}; continue from a checkpoint before it, with a lower optimizer.lr or a lower "
                "optimizer.clip_grad, or begin with a model that is whole"
            )

    def scale_weights(self, factor: float, share: float = 1.0) -> None:
        """Multiply the weights by `factor` until the next optimizer step.

        The self-test uses this to see whether a changed weight reaches the engines.
        share: fraction of the elements to multiply, chosen at random.
        """
        self._call_alike("scale_weights", factor, share)

    def train_step(
        self,
        batch: TrainBatch,
        plan: Schedule,
        loss: TokenLoss | PreferenceLoss,
        current_is_old: bool = False,
        key: tuple[int, int] | None = None,
    ) -> Metrics:
        """Take one optimizer step on a mini-batch. Return its metrics.

        batch: its `weight` (of each token's loss) must be set. If all weights are 0, the step is dropped.
        current_is_old: the current policy is the one that generated the samples, so the loss takes the
            current log-probs, detached, as the old ones.
        key: MiniBatch.key.
        Raises UserError if optimizer.max_dropped_steps steps in a row were dropped. Raises UserError also if
        the gradient norm or the loss is not finite and the weights are not finite either.
        """
        parts = self._split(batch, plan)
        # If no token has a weight, drop the step: Adam would move the weights without a gradient too.
        untrained = () if batch.weight.any() else ("no token has a weight in the loss",)
        results = self._call(
            "train_step", [(mb, loss, batch.num_tokens, current_is_old, key, bool(untrained)) for mb in parts]
        )
        metrics = merge([result.metrics for result in results])
        # This is a sum over micro-batches and ranks, but not over optimizer steps.
        metrics["actor/loss"] = Mean(metrics["actor/loss"].value, 1)
        first = results[0]
        step = key[0] if key else None
        if not (isfinite(first.grad_norm) and isfinite(metrics["actor/loss"].result())):
            self.must_be_finite()
        self._last_step = self._last_step if first.dropped else step
        self._dropped_steps.note(
            first.dropped, first.grad_norm, metrics["actor/loss"].result(), step, first.beyond or untrained
        )
        if loss.limits:
            metrics["actor/steps_beyond_limit"] = Sum(float(bool(first.beyond)))
        metrics["actor/grad_norm"] = Mean(first.grad_norm, 1)
        metrics["actor/lr"] = Mean(first.lr, 1)
        metrics["actor/dropped_steps"] = Sum(float(first.dropped))
        metrics["actor/optimizer_steps"] = Sum(1.0)
        metrics["memory/rank_gib"] = Max(max(result.occupied for result in results) / 2**30)
        return metrics

    @property
    def processes(self) -> list[Process]:
        return self.group.processes

    def sync_order(self, order: Order) -> list[ray.ObjectRef]:
        """Start every rank's part of a weight sync to the engines. Return references to their answers."""
        self._must_be_awake()
        return self.group.submit("sync_order", order)

    def weight_stream(self, max_bytes: int) -> AbstractContextManager:
        """Return a context that yields the current weights as Ray references to buckets, rank by rank.

        The weights have HF names. The object-store weight sync uses this. All buckets must be taken.
        max_bytes: size limit of a bucket.
        """
        self._must_be_awake()
        return self.group.stream("weight_buckets", max_bytes)

    def reset_reference(self) -> None:
        """Make the policy's current weights the reference model's weights."""
        self._call_alike("reset_reference")

    def save_hf(self, folder: str) -> None:
        """Write the current weights as an HF checkpoint. Raises UserError if they are not finite."""
        self.must_be_finite()
        self._call_alike("save_hf", folder)

    def begin_checkpoint(self, folder: str) -> None:
        """Start writing a checkpoint in the background. Training may go on in the meantime.

        The checkpoint is complete when `finish_checkpoint` has returned; the caller must call that.
        Raises UserError if the weights are not finite.
        """
        self.must_be_finite()  # a broken checkpoint must not replace a good one
        self._call_alike("begin_checkpoint", folder)

    def checkpoint_written(self) -> bool:
        """Return True if all ranks' files are written, or there is no checkpoint in progress.

        `finish_checkpoint` then returns quickly. Does not wake the ranks.
        """
        return all(self.group.call("checkpoint_written"))

    def finish_checkpoint(self, timeout: float | None = None) -> SaveReport:
        """Wait until the files of all ranks are complete. Does not wake the ranks.

        timeout: most seconds to wait. None: the timeout of the constructor.
        Returns a SaveReport. Its times are those of the slowest rank. Its bytes and files are those of all
        ranks together.
        Raises NotWritten if a rank could not write its file.
        """
        reports = self.group.call("finish_checkpoint", timeout=timeout)
        files = {name: record for report in reports for name, record in report.files.items()}
        seconds, waited = max(r.seconds for r in reports), max(r.waited for r in reports)
        return SaveReport(seconds, waited, sum(r.bytes for r in reports), files)

    def load_checkpoint(self, folder: str, files: dict[str, FileRecord]) -> None:
        """Check a checkpoint's files, then load it.

        files: {file name: its recorded size and checksum}.
        Raises DamagedCheckpoint, naming the file, if a file differs from its record. Nothing is loaded then.
        """
        self._call_alike("verify_checkpoint", folder, files)
        self._call_alike("load_checkpoint", folder)

    def state_dict(self) -> dict:
        """Return the part of a checkpoint's state that the driver holds, not the ranks: the dropped steps."""
        return {"dropped_steps": self._dropped_steps.state_dict()}

    def load_state_dict(self, state: dict) -> None:
        self._dropped_steps.load_state_dict(state["dropped_steps"])

    def close(self) -> None:
        self.group.close()
