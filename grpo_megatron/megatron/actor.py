"""Actor: one rank of the trained model, with its optimizer and reference weights.

A plain class: Ray wraps it in a run, the tests call it directly. Every method that says collective
must be called on all ranks, with the same arguments unless said otherwise.
"""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.transformer.module import Float16Module

from grpo_megatron.algorithm.losses import TokenLoss
from grpo_megatron.batch import Layout, TrainBatch
from grpo_megatron.config.schema import Precision
from grpo_megatron.megatron import checkpoint
from grpo_megatron.megatron.architecture import read_architecture
from grpo_megatron.megatron.forward_backward import Head, forward_backward, forward_logprobs, prepare
from grpo_megatron.megatron.model import build_model, output_weight, uses_transformer_engine
from grpo_megatron.megatron.optimizer import Optimizer
from grpo_megatron.megatron.parallel import rank_info
from grpo_megatron.megatron.reference import ReferenceWeights
from grpo_megatron.megatron.spec import ActorSpec, TrainResult
from grpo_megatron.metrics import concrete, merge
from grpo_megatron.weights import hf_checkpoint
from grpo_megatron.weights.buckets import Bucket, make_buckets
from grpo_megatron.weights.maps import weight_map
from grpo_megatron.weights.megatron_weights import iterate_hf, load_hf, mark_tensor_parallel

PRECISIONS = {Precision.fp32: torch.float32, Precision.bf16: torch.bfloat16, Precision.fp8: torch.bfloat16}
MicroBatches = list[TrainBatch]
# What the FP8 matrix products demand of the number of tokens.
FP8_ALIGNMENT = 16


class Actor:
    """Needs `parallel.initialize` to have run in this process."""

    def __init__(self, spec: ActorSpec):
        self.spec = spec
        self.rank = rank_info()
        self.device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
        self.arch = read_architecture(spec.model_path)
        sizes = spec.sizes
        transformer_engine = uses_transformer_engine(spec.transformer_impl)
        fp8 = spec.precision == Precision.fp8
        self.entries = weight_map(self.arch, sizes.tp, transformer_engine)
        dtype = PRECISIONS[spec.precision]
        self.model = build_model(self.arch, sizes, self.rank, dtype, transformer_engine, fp8)
        mark_tensor_parallel(self.model, self.entries)
        self.layout = Layout(sizes.tp, sizes.cp, self.rank.cp_rank, sizes.sequence_parallel, FP8_ALIGNMENT if fp8 else 1)
        self.head = Head(lambda: output_weight(self.model), self.arch.vocab_size, sizes.sequence_parallel)
        # Values are read before DDP and optimizer take the parameters into their buffers.
        self.reference = None
        if spec.with_reference:
            load_hf(
                self.model,
                hf_checkpoint.HFCheckpoint(spec.reference_path or spec.model_path),
                self.entries,
                sizes.tp,
                self.rank.tp_rank,
            )
            self.reference = ReferenceWeights(self.model)
        load_hf(self.model, hf_checkpoint.HFCheckpoint(spec.model_path), self.entries, sizes.tp, self.rank.tp_rank)
        config = self.model.config
        module = Float16Module(config, self.model) if dtype == torch.bfloat16 else self.model
        self._gathers_in_forward = spec.overlap and spec.distributed_optimizer
        ddp_config = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            use_distributed_optimizer=spec.distributed_optimizer,
            overlap_grad_reduce=spec.overlap,
            overlap_param_gather=self._gathers_in_forward,
        )
        self.ddp = DistributedDataParallel(config, ddp_config, module)
        if spec.overlap:
            config.no_sync_func = self.ddp.no_sync
        self.optimizer = Optimizer(self.ddp, spec.optimizer, dtype)
        config.finalize_model_grads_func = finalize_model_grads
        config.grad_scale_func = self.optimizer.inner.scale_loss

    @contextmanager
    def _weights_at_rest(self):
        """Within this context all parameters are whole, and no forward hook gathers them anew.

        With overlap the distributed optimizer's new values arrive during the next training forward;
        whoever reads or exchanges weights in between would get the old ones, or be overwritten.
        """
        if self._gathers_in_forward:
            self.ddp.disable_forward_pre_hook(param_sync=True)
        try:
            yield
        finally:
            if self._gathers_in_forward:
                self.ddp.enable_forward_pre_hook()

    def logprobs(self, micro_batches: MicroBatches, reference: bool = False) -> np.ndarray | None:
        """Log-prob of every target, float32 [T] in the order of the micro-batches. Collective.

        micro_batches: those of this rank's data-parallel replica. None except on the rank that
        reports for it.
        """
        if reference and self.reference is None:
            raise RuntimeError("this actor was built without reference weights")
        prepared = [prepare(batch, self.layout, self.device) for batch in micro_batches]
        self.ddp.eval()
        with self._weights_at_rest(), self.reference.in_place() if reference else nullcontext():
            parts = forward_logprobs(self.ddp, prepared, self.head, self.spec.temperature)
        return np.concatenate(parts) if self.rank.reports else None

    def train_step(
        self, micro_batches: MicroBatches, loss: TokenLoss, step_tokens: int, current_is_old: bool = False
    ) -> TrainResult | None:
        """One optimizer step on sum_t w_t l_t over all replicas. Collective; None as in `logprobs`.

        step_tokens: tokens of the step over all replicas. current_is_old: see config OldLogprobs.
        """
        self.compute_gradients(micro_batches, loss, step_tokens, current_is_old)
        outcome = self.optimizer.step()
        if not self.rank.reports:
            return None
        return TrainResult(outcome.grad_norm, outcome.lr, outcome.dropped, self._metrics)

    def compute_gradients(
        self, micro_batches: MicroBatches, loss: TokenLoss, step_tokens: int, current_is_old: bool = False
    ) -> None:
        """The gradient part of `train_step`, left in the parameters' `main_grad`. Collective."""
        self.ddp.train()
        self.ddp.zero_grad_buffer()
        self.optimizer.zero_grad()
        prepared = [prepare(batch, self.layout, self.device, current_is_old) for batch in micro_batches]
        parts = forward_backward(self.ddp, prepared, self.head, loss, self.spec.temperature, step_tokens)
        self._metrics = merge([concrete(part) for part in parts]) if self.rank.reports else {}

    def weight_buckets(self, max_bytes: int) -> Iterator[Bucket]:
        """The current weights in HF names, on one rank per stage; empty elsewhere. Collective.

        Must be exhausted on every rank, because gathering is collective over the TP group.
        """
        with self._weights_at_rest():
            if not self.rank.in_first_replica:
                return
            # On ranks that receive nothing the loop still drives the collectives.
            yield from make_buckets(iterate_hf(self.model, self.entries, mpu.get_tensor_model_parallel_group()), max_bytes)

    def save_hf(self, folder: str, dtype: torch.dtype | None = None) -> None:
        """Write the weights as an HF checkpoint, with the tokenizer of the original. Collective.

        dtype: of the written tensors; None keeps the training precision. Written aside and put in
        place when whole, in place of what was there.
        """
        dtype = dtype or PRECISIONS[self.spec.precision]
        final, folder = folder, f"{folder}.partial"
        if self.rank.rank == 0:
            hf_checkpoint.start(folder, final, self.spec.model_path)
        dist.barrier()
        shards = []
        with self._weights_at_rest():
            if self.rank.in_first_replica:
                writer = hf_checkpoint.HFWriter(folder, f"{self.rank.pp_rank:03d}")
                for name, tensor in iterate_hf(self.model, self.entries, mpu.get_tensor_model_parallel_group()):
                    writer.add(name, tensor.to(dtype))
                shards = writer.close()  # empty where nothing was gathered
        everyone: list = [None] * self.spec.sizes.world_size
        dist.all_gather_object(everyone, (self.rank.pp_rank, shards))
        if self.rank.rank == 0:
            in_order = sorted((item for item in everyone if item[1]), key=lambda item: item[0])
            hf_checkpoint.copy_companions(self.spec.model_path, folder, dtype)
            hf_checkpoint.finish(folder, list(itertools.chain.from_iterable(part for _, part in in_order)), final)
        dist.barrier()

    def save_checkpoint(self, folder: str) -> None:
        """Collective; see megatron.checkpoint."""
        with self._weights_at_rest():
            checkpoint.save(folder, self.ddp.module, self.optimizer)

    def load_checkpoint(self, folder: str) -> None:
        """Weights, optimizer and learning-rate state; the reference stays what it was. Collective."""
        with self._weights_at_rest():
            checkpoint.load(folder, self.ddp.module, self.optimizer)
