"""Actor: one rank of the trained model, with its optimizer and reference weights.

Actor is a plain class. PolicyTrainer calls it through a Ray actor; the tests in tests/parallel call it
directly. A method whose docstring says "Collective" must be called on all ranks at the same time. Arguments
are the same on all ranks, except micro-batches, which are those of the rank's data-parallel replica.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from grpo_megatron.algorithm.losses import TokenLoss
from grpo_megatron.algorithm.preferences import PreferenceLoss
from grpo_megatron.batch.train_batch import TrainBatch
from grpo_megatron.cluster.heartbeat import Heartbeat
from grpo_megatron.cluster.memory import occupied
from grpo_megatron.config.schema import RoutingReplay
from grpo_megatron.megatron import checkpoint_files, export, lora, sharded_state
from grpo_megatron.megatron.checkpoint_files import Writer
from grpo_megatron.megatron.forward_backward import (
    forward_backward,
    forward_logprobs,
    forward_probe,
    forward_scores,
)
from grpo_megatron.megatron.memory import Bytes, TrainingMemory
from grpo_megatron.megatron.micro_batch import MicroBatch, MiniBatchStore, choose_routing
from grpo_megatron.megatron.model import build_model, output_weight, uses_transformer_engine
from grpo_megatron.megatron.objectives import make_head, make_objective
from grpo_megatron.megatron.parameters import names_of_broken, scale_parameters
from grpo_megatron.megatron.parking import return_to_system
from grpo_megatron.megatron.process_groups import local_device, rank_info
from grpo_megatron.megatron.reference import ReferencePasses, ReferenceWeights
from grpo_megatron.megatron.reward_model import RewardModel
from grpo_megatron.megatron.rounding import rounding_noise
from grpo_megatron.megatron.router import Routing
from grpo_megatron.megatron.score_head import load_reward_model
from grpo_megatron.megatron.spec import ActorSpec, TrainResult
from grpo_megatron.megatron.step_metrics import beyond_limits, merge_over_context, router_metrics
from grpo_megatron.megatron.training_setup import wrap_for_training
from grpo_megatron.megatron.weights import iterate_hf, load_hf, mark_parallel
from grpo_megatron.metrics import Metrics, concrete, merge
from grpo_megatron.model.adapters import adapter_entries
from grpo_megatron.model.entries import engine_stacks
from grpo_megatron.model.families import read_architecture, weight_map
from grpo_megatron.paths import writing
from grpo_megatron.run.checkpoints import SaveReport
from grpo_megatron.run.manifest import FileRecord
from grpo_megatron.weights import hf_checkpoint
from grpo_megatron.weights.buckets import Bucket, make_buckets
from grpo_megatron.weights.sync.order import Answer, Order
from grpo_megatron.weights.sync.sender import Sender, sender_for

MicroBatches = list[TrainBatch]
Key = tuple[int, int]


class Actor:
    """One rank of the trained model. `process_groups.initialize` must have run in this process."""

    def __init__(self, spec: ActorSpec, heartbeat: Heartbeat | None = None):
        """Build the model, load its weights and set up the optimizer.

        heartbeat: heartbeat of this process, for the driver's hang detector. None: report no progress.
        """
        self.spec, self._heartbeat = spec, heartbeat or Heartbeat()
        self.rank = rank_info()
        self.device = local_device()
        self.arch = read_architecture(spec.model_path, reward_model=spec.scalar_head)
        self.model_spec = model_spec = spec.model_spec(
            uses_transformer_engine(spec.transformer_impl, spec.precision, spec.emulate_kernels)
        )
        self._sender: Sender | None = None
        self.reward_model = RewardModel(spec, self._heartbeat.tick) if spec.reward_model else None
        self.entries = weight_map(self.arch, model_spec.transformer_engine)
        self.chunks = build_model(self.arch, model_spec)
        for chunk in self.chunks:
            chunk.register_forward_pre_hook(lambda *_: self._heartbeat.tick())
        mark_parallel(self.chunks, self.entries)
        self.adapters = adapter_entries(self.entries.values(), spec.lora)
        if self.adapters:
            lora.attach(self.chunks, self.adapters, spec.seed)
        layout = spec.layout(self.rank.cp_rank)
        self.mini_batches = MiniBatchStore(
            layout, self.device, own_attention=not model_spec.transformer_engine
        )
        self.head = make_head(self.chunks, self.arch, spec)
        # Read the values before DDP and the optimizer move the parameters into their buffers.
        self.reference, same_model = None, spec.reference_path in (None, spec.model_path)
        if spec.with_reference:
            self._load(spec.reference_path or spec.model_path)
            self.reference = ReferenceWeights(
                self.chunks, on_host=spec.reference_offload, same_model=same_model
            )
        if not spec.with_reference or not same_model:
            self._load(spec.model_path)
        self._set_up_training()

    def _load(self, folder: str) -> None:
        """Fill the parameters from an HF checkpoint. Benchmarks override this to run without a checkpoint."""
        if self.arch.scalar_head:
            load_reward_model(self.chunks, folder, self.entries, self.spec.seed)
        else:
            load_hf(self.chunks, hf_checkpoint.HFCheckpoint(folder), self.entries)

    def _set_up_training(self) -> None:
        """Wrap each model chunk in Megatron's DDP, and build the optimizer over all chunks."""
        spec = self.spec
        self._gathers_in_forward = spec.overlap and spec.distributed_optimizer
        self.ddp, self.optimizer = wrap_for_training(self.chunks, spec, self.model_spec.params_dtype)
        self.memory = TrainingMemory(self.ddp, self.optimizer, spec.optimizer.offload, spec.offload_folder)
        self._writer: Writer | None = None
        self._reference_passes = ReferencePasses()

    @contextmanager
    def _settled_weights(self):
        """Wait until all parameters have their newest values, and keep them so within the context.

        Enter it before weights are read or swapped. With megatron.overlap, the distributed optimizer's new
        values arrive only during the next training forward pass: code would read old values, or its own would
        be overwritten.
        Raises RuntimeError between `begin_reference` and `end_reference`.
        """
        self._reference_passes.require_policy()
        overlapping = self.ddp if self._gathers_in_forward else []
        for ddp in overlapping:
            ddp.disable_forward_pre_hook(param_sync=True)
        for ddp in self.ddp:
            ddp.eval()
        try:
            yield
        finally:
            for ddp in overlapping:
                ddp.enable_forward_pre_hook()

    def _until_saved(self, weights_only: bool = False) -> None:
        """Wait until the checkpoint thread, which reads tensors without a copy, no longer needs them.

        weights_only: the caller is about to change only weights, not the optimizer's states.
        """
        if self._writer:
            self._writer.wait_until_read(weights_only)

    def make_room(self) -> None:
        """Free memory that later passes can rebuild: prepared micro-batches, FP8 weight copies, caches."""
        self.mini_batches.clear()
        self.memory.drop_fp8_casts()
        return_to_system()

    def sleep(self) -> dict[str, Bytes]:
        """Free the device memory of weights, gradients and optimizer states until `wake`. Collective.

        Rollout engines use the memory in the meantime. Until `wake`, only `checkpoint_written` and
        `finish_checkpoint` may be called.
        Returns {"before": {kind: bytes}, "asleep": {kind: bytes}}: memory before and after. The kinds are
        those of TrainingMemory.resident, and "occupied" for all memory of this process.
        """
        report = {"before": self.memory.resident() | {"occupied": occupied()}}
        with self._settled_weights():
            pass  # waits for values that are still arriving from other replicas
        self._until_saved()
        self.make_room()
        self.memory.sleep()
        return report | {"asleep": self.memory.resident() | {"occupied": occupied()}}

    def wake(self) -> None:
        """Bring weights, gradients and optimizer states back after `sleep`. Collective."""
        self.memory.wake()

    def begin_reference(self) -> None:
        """Let the model compute with the reference's weights until `end_reference`. Collective.

        In between, only `logprobs(reference=True)` may be called, any number of times. A weight sync or a
        checkpoint would take the reference's weights for the policy's.
        """
        if self.reference is None:
            raise RuntimeError("this actor was built without reference weights")
        self._until_saved(weights_only=True)
        self._reference_passes.begin(self._settled_weights(), self.reference.in_place())

    def end_reference(self) -> None:
        """Put the policy's weights back. Collective."""
        self._reference_passes.end()

    def logprobs(
        self,
        micro_batches: MicroBatches,
        reference: bool = False,
        key: Key | None = None,
        keep_hidden: bool = False,
    ) -> np.ndarray | None:
        """Return the log-prob of every target, float32 [T], in the order of the micro-batches. Collective.

        Only one rank per data-parallel replica returns them (RankInfo.reports); the others return None.
        reference: compute with the reference's weights; `begin_reference` must have been called.
        key: (step, index of the mini-batch). Later passes with the same key reuse the prepared inputs and,
            with moe.routing_replay, the choice of experts.
        keep_hidden: with `reference`, keep the last hidden states for the exact KL of `train_step`.
        """
        if reference and not self._reference_passes.begun:
            raise RuntimeError("a pass of the reference needs begin_reference first")
        prepared = self.mini_batches.get(key, micro_batches)
        routing = Routing.own if reference else self._route(prepared, micro_batches, recording=True)
        keep = partial(self.mini_batches.keep_hidden, on_device=self.spec.reference_hidden_bytes)
        with nullcontext() if reference else self._settled_weights():
            parts = forward_logprobs(self.ddp, prepared, self.head, routing, keep if keep_hidden else None)
        return torch.cat(parts).cpu().numpy() if self.rank.reports else None

    def scores(self, micro_batches: MicroBatches) -> np.ndarray | None:
        """Return the reward model's score of every sequence, float32 [S], in their order. Collective.

        The frozen reward model computes them if there is one, otherwise the trained model.
        Only one rank per data-parallel replica returns them; the others return None.
        """
        prepared = self.mini_batches.get(None, micro_batches)
        with self._settled_weights():
            of_policy = partial(forward_scores, self.ddp, head=self.head)
            parts = (self.reward_model or of_policy)(prepared)
        return torch.cat(parts).cpu().numpy() if self.rank.reports else None

    def probe(
        self, micro_batches: MicroBatches, temperature: float, rounding: torch.dtype | None
    ) -> np.ndarray | None:
        """Return log-prob and entropy of every target, float32 [2, T], to compare with engines. Collective.

        Only one rank per data-parallel replica returns them; the others return None.
        temperature: divides the logits, in place of the configured temperature.
        rounding: multiply each layer's output by random rounding errors of this dtype. None: do not.
        """
        prepared = self.mini_batches.get(None, micro_batches)
        # No earlier pass recorded a routing of these sequences. Only the engine's samples may bring one.
        replays = (
            self.spec.moe.routing_replay == RoutingReplay.engine and micro_batches[0].routing is not None
        )
        routing = self._route(prepared, micro_batches, recording=True) if replays else Routing.own
        with self._settled_weights(), rounding_noise(self.chunks, rounding) if rounding else nullcontext():
            parts = forward_probe(self.ddp, prepared, replace(self.head, temperature=temperature), routing)
        return torch.cat(parts, dim=1).cpu().numpy() if self.rank.reports else None

    def scale_weights(self, factor: float, share: float = 1.0) -> None:
        """Multiply every parameter by `factor`, so that the self-test can sync changed weights. Collective.

        The optimizer's master weights do not change, so the next optimizer step undoes the change.
        share: fraction of the elements to multiply, chosen at random. Below 1, replicas then differ, and
            nothing may be trained afterwards.
        """
        self._until_saved(weights_only=True)
        with self._settled_weights():
            for chunk in self.chunks:
                scale_parameters(chunk, factor, share)

    def broken_weights(self) -> list[str]:
        """Return the names of this rank's parameters that contain NaN or infinity. Collective."""
        with self._settled_weights():
            return [name for chunk in self.chunks for name in names_of_broken(chunk)]

    def _route(self, prepared: list[MicroBatch], micro_batches: MicroBatches, recording: bool) -> Routing:
        return choose_routing(self.spec.moe.routing_replay, self.arch.moe, prepared, micro_batches, recording)

    def train_step(
        self,
        micro_batches: MicroBatches,
        loss: TokenLoss | PreferenceLoss,
        step_tokens: int,
        current_is_old: bool = False,
        key: Key | None = None,
        drop: bool = False,
    ) -> TrainResult | None:
        """Take one optimizer step on the weighted sum of all replicas' token losses. Collective.

        Only one rank per data-parallel replica returns a TrainResult; the others return None.
        step_tokens: tokens of the optimizer step over all replicas, padding excluded.
        current_is_old: take the current log-probs as those of the old policy (train.old_logprobs=current).
        key: (step, index of the mini-batch), see `logprobs`.
        drop: compute loss and gradient norm, but leave the weights unchanged.
        """
        metrics = self.compute_gradients(micro_batches, loss, step_tokens, current_is_old, key)
        beyond = beyond_limits(loss.limits, metrics)
        self._until_saved()
        with self._heartbeat.phase("optimizer"), self.memory.optimizer_at_hand():
            outcome = self.optimizer.step(drop=drop or bool(beyond))
        if not self.rank.reports:
            return None
        return TrainResult(outcome.grad_norm, outcome.lr, outcome.dropped, metrics, beyond, occupied())

    def compute_gradients(
        self,
        micro_batches: MicroBatches,
        loss: TokenLoss | PreferenceLoss,
        step_tokens: int,
        current_is_old: bool = False,
        key: Key | None = None,
    ) -> Metrics:
        """Compute the gradients of `train_step` into the parameters' `main_grad`. Collective.

        Returns this replica's metrics on one rank of the replica, and an empty dict on its other ranks.
        """
        self._reference_passes.require_policy()
        for ddp in self.ddp:
            ddp.train()
            ddp.zero_grad_buffer()
        self.optimizer.zero_grad()
        prepared = self.mini_batches.get(key, micro_batches)
        head = self.head
        if loss.needs_full_kl and self.rank.last_stage:
            reference_weight = self.reference.value_of(output_weight(self.chunks[-1]))
            head = replace(head, reference_weight=lambda: reference_weight)
        routing = self._route(prepared, micro_batches, recording=False)
        objective = make_objective(head, loss, prepared, micro_batches, current_is_old)
        with self._heartbeat.phase("forward_backward"):
            parts = forward_backward(self.ddp, prepared, objective, step_tokens, routing)
        routers: Metrics = {}
        if self.arch.moe is not None:
            tokens = sum(batch.num_tokens for batch in micro_batches)
            routers = router_metrics(self.chunks, self.arch.moe, self.spec.moe, tokens, self.device)
        *parts, routers = concrete([*parts, routers])
        metrics = merge_over_context(merge(parts)) if self.rank.last_stage else {}
        return metrics | routers if self.rank.reports else {}

    def reset_reference(self) -> None:
        """Make the policy's current weights the reference model's weights. Collective."""
        if self.reference is None:
            raise RuntimeError("this actor was built without reference weights")
        self._until_saved(weights_only=True)  # the checkpoint's weights include the reference's
        with self._settled_weights():
            self.reference.take_current()

    def sync_order(self, order: Order) -> Answer:
        """Do this rank's part of a weight sync to the engines, and return its answer to the driver.

        The sender and its connections are kept until an order with another setup comes.
        """
        with_te = self.model_spec.transformer_engine
        self._sender = sender_for(order.setup, self._sender, self.rank.rank, self.device, with_te)
        with self._settled_weights(), torch.no_grad():
            return self._sender.send(order, lora.MergedWeights(self.chunks), self._heartbeat.tick)

    def weight_buckets(self, max_bytes: int) -> Iterator[Bucket]:
        """Yield the current weights under HF names in buckets of at most `max_bytes`. Collective.

        Each weight comes from one rank only. Exhaust the iterator on every rank, also on those that yield
        nothing, because weights are gathered collectively over the TP group.
        """
        with self._settled_weights():
            # Ranks that yield no weight still run the loop, because it drives the collectives.
            tensors = iterate_hf(self.chunks, self.entries, values=lora.MergedWeights(self.chunks))
            yield from make_buckets(tensors, max_bytes, engine_stacks(self.entries.values()))

    def save_hf(self, folder: str, dtype: torch.dtype | None = None) -> None:
        """Write the current weights as an HF checkpoint. Collective.

        dtype: dtype of the written tensors. None: that of the parameters. Raises UserError if the disk fails.
        """
        with writing(folder), self._settled_weights():
            dtype = dtype or self.model_spec.params_dtype
            export.save_hf(self.chunks, self.entries, self.spec, self.arch, folder, dtype, self.adapters)

    def begin_checkpoint(self, folder: str) -> None:
        """Start writing weights, optimizer and learning-rate state as they are now. Collective.

        A thread writes them while other methods may be called. Methods that change what is still to be
        written wait for the thread. The checkpoint is complete when `finish_checkpoint` has returned.
        """
        if self._writer:
            raise RuntimeError("the last checkpoint has not been finished")
        with self._settled_weights(), self.memory.optimizer_at_hand():
            self._writer = sharded_state.save(
                folder, [ddp.module for ddp in self.ddp], self.optimizer, self.reference
            )
            if self.spec.optimizer.offload:
                self._until_saved()

    def checkpoint_written(self) -> bool:
        """Return True if this rank has written its file, or no checkpoint is in progress."""
        return self._writer is None or self._writer.done()

    def finish_checkpoint(self) -> SaveReport:
        """Wait until the checkpoint of `begin_checkpoint` is on disk. Collective. May be called while asleep.

        Raises NotWritten on all ranks if any rank could not write. The message names these ranks.
        """
        writer, self._writer = self._writer, None
        return writer.finish()

    def verify_checkpoint(self, folder: str, files: dict[str, FileRecord]) -> None:
        """Check a checkpoint's files before `load_checkpoint`. Collective. Raises DamagedCheckpoint.

        files: {file name: its recorded size and checksum}.
        """
        checkpoint_files.verify(folder, files)

    def load_checkpoint(self, folder: str) -> None:
        """Restore weights, optimizer, learning-rate state, and a reference that was reset. Collective."""
        self._until_saved()
        with self._settled_weights(), self.memory.optimizer_at_hand():
            sharded_state.load(folder, [ddp.module for ddp in self.ddp], self.optimizer, self.reference)
