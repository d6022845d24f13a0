"""Actor: one rank of the trained model, with its optimizer and reference weights.

A plain class: Ray wraps it in a run, the tests call it directly. Every method that says collective
must be called on all ranks, with the same arguments unless said otherwise.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.transformer.module import Float16Module

from grpo_megatron.algorithm.losses import TokenLoss
from grpo_megatron.algorithm.preferences import PreferenceLoss
from grpo_megatron.batch.train_batch import TrainBatch
from grpo_megatron.cluster.heart import Heart
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
from grpo_megatron.megatron.memory import Bytes, Parking, TrainingMemory, return_to_system
from grpo_megatron.megatron.micro_batch import MicroBatch, MiniBatchStore, choose_routing
from grpo_megatron.megatron.model import build_model, output_weight, uses_transformer_engine
from grpo_megatron.megatron.objectives import make_head, make_objective
from grpo_megatron.megatron.optimizer import Optimizer
from grpo_megatron.megatron.process_groups import rank_info
from grpo_megatron.megatron.reference import ReferenceWeights
from grpo_megatron.megatron.reward_model import RewardModel
from grpo_megatron.megatron.rounding import rounding_noise
from grpo_megatron.megatron.router import Routing
from grpo_megatron.megatron.score_head import load_reward_model
from grpo_megatron.megatron.spec import ActorSpec, TrainResult
from grpo_megatron.megatron.step_metrics import beyond_limits, merge_over_context, router_metrics
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
from grpo_megatron.weights.sync.sender import Sender

MicroBatches = list[TrainBatch]
Key = tuple[int, int]


class Actor:
    """Needs `process_groups.initialize` to have run in this process."""

    def __init__(self, spec: ActorSpec, heart: Heart | None = None):
        """heart: of this process; it is told of micro-batches and parts of steps. None: nobody listens."""
        self.spec, self._heart = spec, heart or Heart()
        self.rank = rank_info()
        self.device = (
            torch.device("cuda", torch.cuda.current_device())
            if torch.cuda.is_available()
            else torch.device("cpu")
        )
        self.arch = read_architecture(spec.model_path, reward_model=spec.scalar_head)
        self.model_spec = model_spec = spec.model_spec(
            uses_transformer_engine(spec.transformer_impl, spec.precision, spec.emulate_kernels)
        )
        self._sender = None
        self.reward_model = RewardModel(spec, self._heart.tick) if spec.reward_model else None
        self.entries = weight_map(self.arch, model_spec.transformer_engine)
        self.chunks = build_model(self.arch, model_spec)
        for chunk in self.chunks:
            chunk.register_forward_pre_hook(lambda *_: self._heart.tick())
        mark_parallel(self.chunks, self.entries)
        self.adapters = adapter_entries(self.entries.values(), spec.lora)
        if self.adapters:
            lora.attach(self.chunks, self.adapters, spec.seed)
        layout = spec.layout(self.rank.cp_rank)
        self.mini_batches = MiniBatchStore(
            layout, self.device, own_attention=not model_spec.transformer_engine
        )
        self.head = make_head(self.chunks, self.arch, spec)
        # Values are read before DDP and optimizer take the parameters into their buffers.
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
        """Fill the parameters. On its own for measurements, which need no checkpoint of the size of a model."""
        if self.arch.scalar_head:
            load_reward_model(self.chunks, folder, self.entries, self.spec.seed)
        else:
            load_hf(self.chunks, hf_checkpoint.HFCheckpoint(folder), self.entries)

    def _set_up_training(self) -> None:
        """DDP around each chunk, and the optimizer over all of them."""
        spec, config, dtype = self.spec, self.chunks[0].config, self.model_spec.params_dtype
        self._gathers_in_forward = spec.overlap and spec.distributed_optimizer
        ddp_config = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            use_distributed_optimizer=spec.distributed_optimizer,
            overlap_grad_reduce=spec.overlap,
            overlap_param_gather=self._gathers_in_forward,
        )
        modules = [
            Float16Module(config, chunk) if dtype == torch.bfloat16 else chunk for chunk in self.chunks
        ]
        self.ddp = [
            # Buckets pay off in the chunk whose backward runs last only.
            DistributedDataParallel(config, ddp_config, module, disable_bucketing=i > 0)
            for i, module in enumerate(modules)
        ]
        if spec.overlap:
            no_sync = [ddp.no_sync for ddp in self.ddp]
            config.no_sync_func = no_sync if len(no_sync) > 1 else no_sync[0]
        self.optimizer = Optimizer(self.ddp, spec.optimizer, dtype)
        config.finalize_model_grads_func = finalize_model_grads
        config.grad_scale_func = self.optimizer.inner.scale_loss
        self.memory, self._parking = TrainingMemory(self.ddp, self.optimizer), Parking(spec.offload_folder)
        self._writer: Writer | None = None
        self._reference_passes: ExitStack | None = None
        self._park_optimizer()

    def _require_policy(self) -> None:
        if self._reference_passes is not None:
            raise RuntimeError(
                "the reference's weights are in the policy's place: end_reference must come first"
            )

    @contextmanager
    def _settled_weights(self):
        """Within this context all parameters are whole, no forward hook gathers them anew, and nothing is being trained.

        With overlap the distributed optimizer's new values arrive during the next training forward; whoever reads or exchanges
        weights in between would get the old ones, or be overwritten. Raises RuntimeError between `begin_reference` and `end_reference`.
        """
        self._require_policy()
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

    @contextmanager
    def _optimizer_at_hand(self):
        """Within this context the optimizer's states are in the device's memory."""
        self._parking.unpark("optimizer")
        try:
            yield
        finally:
            self._park_optimizer()

    def _park_optimizer(self) -> None:
        if self.spec.optimizer.offload:
            self._parking.park("optimizer", self.memory.optimizer())

    def _until_saved(self, weights_only: bool = False) -> None:
        """Called before weights or optimizer states change: a checkpoint may be being written from where they are."""
        if self._writer:
            self._writer.wait_until_read(weights_only)

    def make_room(self) -> None:
        """Give back what the next passes make again: the micro-batches of the step, weights cast to FP8, and freed memory."""
        self.mini_batches.clear()
        self.memory.drop_fp8_casts()
        return_to_system()

    def sleep(self) -> dict[str, Bytes]:
        """Give back the memory of weights, gradients and optimizer states, until `wake`. Collective.

        Nothing but `wake` may be called meanwhile. Returns what was resident before and what stays, by
        kind, with all the process occupies under "occupied".
        """
        report = {"before": self.memory.resident() | {"occupied": occupied()}}
        with self._settled_weights():
            pass  # values on their way from other replicas arrive first
        self._until_saved()
        self.make_room()
        if not self._parking.parked("optimizer"):
            self._parking.park("optimizer", self.memory.optimizer())
        self._parking.park("parameters", self.memory.parameters())
        self._parking.park("gradients", self.memory.gradients(), keep=False)
        return report | {"asleep": self.memory.resident() | {"occupied": occupied()}}

    def wake(self) -> None:
        """Undo `sleep`. Collective."""
        self._parking.unpark("gradients")
        self._parking.unpark("parameters")
        if not self.spec.optimizer.offload:
            self._parking.unpark("optimizer")

    def begin_reference(self) -> None:
        """From here to `end_reference` the reference's weights are in the policy's place, for any number of passes. Collective.

        Nothing but passes of the reference may be called meanwhile: a weight sync or a checkpoint would take its weights for the policy's.
        """
        if self.reference is None:
            raise RuntimeError("this actor was built without reference weights")
        with ExitStack() as passes:
            self._until_saved(weights_only=True)
            passes.enter_context(self._settled_weights())
            passes.enter_context(self.reference.in_place())
            self._reference_passes = passes.pop_all()

    def end_reference(self) -> None:
        """The policy's weights are back in their place. Collective."""
        passes, self._reference_passes = self._reference_passes, None
        passes.close()

    def logprobs(
        self,
        micro_batches: MicroBatches,
        reference: bool = False,
        key: Key | None = None,
        keep_hidden: bool = False,
    ) -> np.ndarray | None:
        """Log-prob of every target, float32 [T] in the order of the micro-batches. Collective.

        micro_batches: those of this rank's data-parallel replica. key: names the mini-batch, so that what was laid out (and, as
        configured, routed) is used again by its other passes. reference: under the reference's weights, after `begin_reference`.
        keep_hidden: with reference, keep its hidden states for the exact KL. None except on the rank that reports for the replica.
        """
        if reference and self._reference_passes is None:
            raise RuntimeError("a pass of the reference needs begin_reference first")
        prepared = self.mini_batches.get(key, micro_batches)
        routing = Routing.own if reference else self._route(prepared, micro_batches, recording=True)
        keep = (
            partial(self.mini_batches.keep_hidden, on_device=self.spec.reference_hidden_bytes)
            if keep_hidden
            else None
        )
        with nullcontext() if reference else self._settled_weights():
            parts = forward_logprobs(self.ddp, prepared, self.head, routing, keep)
        return torch.cat(parts).cpu().numpy() if self.rank.reports else None

    def scores(self, micro_batches: MicroBatches) -> np.ndarray | None:
        """The reward model's score of every sequence, float32 [S] in their order. Collective; None as in `logprobs`."""
        prepared = self.mini_batches.get(None, micro_batches)
        with self._settled_weights():
            parts = (
                self.reward_model(prepared)
                if self.reward_model
                else forward_scores(self.ddp, prepared, self.head)
            )
        return torch.cat(parts).cpu().numpy() if self.rank.reports else None

    def probe(
        self, micro_batches: MicroBatches, temperature: float, rounding: torch.dtype | None
    ) -> np.ndarray | None:
        """Log-prob and entropy of every target, float32 [2, T], under changed conditions. Collective; None as in `logprobs`.

        temperature: in place of the configured one. rounding: with the rounding errors of this dtype added in every
        layer, see `rounding_noise`.
        """
        prepared = self.mini_batches.get(None, micro_batches)
        # No routing was recorded for these; with the engine's, samples of the engine bring it.
        from_engine = (
            self.spec.moe.routing_replay == RoutingReplay.engine and micro_batches[0].routing is not None
        )
        routing = self._route(prepared, micro_batches, recording=True) if from_engine else Routing.own
        with self._settled_weights(), rounding_noise(self.chunks, rounding) if rounding else nullcontext():
            parts = forward_probe(self.ddp, prepared, replace(self.head, temperature=temperature), routing)
        return torch.cat(parts, dim=1).cpu().numpy() if self.rank.reports else None

    @torch.no_grad()
    def scale_weights(self, factor: float, share: float = 1.0) -> None:
        """Multiply every parameter, but not the optimizer's masters: the next step takes it back. Collective.

        share: of the elements, chosen at random. Replicas then differ, so with less than 1 nothing may be trained afterwards.
        """
        self._until_saved(weights_only=True)
        with self._settled_weights():
            for chunk in self.chunks:
                for parameter in chunk.parameters():
                    chosen = (
                        factor
                        if share == 1.0
                        else torch.where(torch.rand_like(parameter) < share, factor, 1.0)
                    )
                    parameter.mul_(chosen)

    def broken_weights(self) -> list[str]:
        """Names of this rank's parameters that are not finite throughout. Collective."""
        with self._settled_weights():
            return [
                name
                for chunk in self.chunks
                for name, each in chunk.named_parameters()
                if not each.isfinite().all()
            ]

    def _route(self, prepared: list[MicroBatch], micro_batches: MicroBatches, recording: bool) -> Routing:
        """See `choose_routing`."""
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
        """One optimizer step on sum_t w_t l_t over all replicas. Collective; key, None as in `logprobs`.

        step_tokens: tokens of the step over all replicas. current_is_old: see config OldLogprobs. drop: only
        measure, as if the gradient were not finite.
        """
        metrics = self.compute_gradients(micro_batches, loss, step_tokens, current_is_old, key)
        beyond = beyond_limits(loss.limits, metrics)
        self._until_saved()
        with self._heart.phase("optimizer"), self._optimizer_at_hand():
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
        """The gradient part of `train_step`, left in the parameters' `main_grad`. Collective.

        Returns this replica's metrics, on its reporting rank (empty on others).
        """
        self._require_policy()
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
        with self._heart.phase("forward_backward"):
            parts = forward_backward(self.ddp, prepared, objective, step_tokens, routing)
        routers: Metrics = {}
        if self.arch.moe is not None:
            tokens = sum(batch.num_tokens for batch in micro_batches)
            routers = router_metrics(self.chunks, self.arch.moe, self.spec.moe, tokens, self.device)
        *parts, routers = concrete([*parts, routers])
        metrics = merge_over_context(merge(parts)) if self.rank.last_stage else {}
        return metrics | routers if self.rank.reports else {}

    def reset_reference(self) -> None:
        """The current weights become the reference. Collective."""
        if self.reference is None:
            raise RuntimeError("this actor was built without reference weights")
        self._until_saved(weights_only=True)  # of which those of the reference are a part
        with self._settled_weights():
            self.reference.take_current()

    def sync_order(self, order: Order) -> Answer:
        """This rank's side of a weight sync. The setup of the first order is kept, with its channel, until another one comes."""
        if self._sender is None or self._sender.setup != order.setup:
            if self._sender is not None:
                self._sender.close()
            self._sender = Sender(
                order.setup, self.rank.rank, self.device, self.model_spec.transformer_engine
            )
        with self._settled_weights(), torch.no_grad():
            return self._sender.send(order, lora.MergedWeights(self.chunks), self._heart.tick)

    def weight_buckets(self, max_bytes: int) -> Iterator[Bucket]:
        """The current weights in HF names, each on one rank. Collective.

        Must be exhausted on every rank, because gathering is collective over the TP group.
        """
        with self._settled_weights():
            # On ranks that hand out nothing the loop still drives the collectives.
            tensors = iterate_hf(self.chunks, self.entries, values=lora.MergedWeights(self.chunks))
            yield from make_buckets(tensors, max_bytes, engine_stacks(self.entries.values()))

    def save_hf(self, folder: str, dtype: torch.dtype | None = None) -> None:
        """Write an HF checkpoint, see `export.save_hf`. dtype: of the tensors; None keeps the training precision. Collective.

        Raises UserError for a disk that is full.
        """
        with writing(folder), self._settled_weights():
            dtype = dtype or self.model_spec.params_dtype
            export.save_hf(self.chunks, self.entries, self.spec, self.arch, folder, dtype, self.adapters)

    def begin_checkpoint(self, folder: str) -> None:
        """Begin to write weights, optimizer and learning-rate state as they are now. Collective.

        Other methods may be called meanwhile; those that change the state wait until it is read. The checkpoint is whole
        when `finish_checkpoint` has returned.
        """
        if self._writer:
            raise RuntimeError("the last checkpoint has not been finished")
        with self._settled_weights(), self._optimizer_at_hand():
            self._writer = sharded_state.save(
                folder, [ddp.module for ddp in self.ddp], self.optimizer, self.reference
            )
            if self.spec.optimizer.offload:
                self._until_saved()

    def checkpoint_written(self) -> bool:
        """Whether `finish_checkpoint` has nothing to wait for on this rank."""
        return self._writer is None or self._writer.done()

    def finish_checkpoint(self) -> SaveReport:
        """Wait until the checkpoint that was begun is on the disk. Collective; may be called asleep.

        Raises NotWritten on all ranks, naming those that could not write.
        """
        writer, self._writer = self._writer, None
        return writer.finish()

    def verify_checkpoint(self, folder: str, files: dict[str, FileRecord]) -> None:
        """Nothing of a checkpoint is read before this has found each file to be as recorded. Collective. Raises DamagedCheckpoint."""
        checkpoint_files.verify(folder, files)

    def load_checkpoint(self, folder: str) -> None:
        """Weights, optimizer and learning-rate state, and the reference if it was reset. Collective."""
        self._until_saved()
        with self._settled_weights(), self._optimizer_at_hand():
            sharded_state.load(folder, [ddp.module for ddp in self.ddp], self.optimizer, self.reference)
