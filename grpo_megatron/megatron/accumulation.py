"""AccumulatedGradients: gradients that several calls add up on one rank, and the optimizer step on them."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import numpy as np
import torch
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads

from grpo_megatron.algorithm.losses import TokenLoss
from grpo_megatron.batch.train_batch import TrainBatch
from grpo_megatron.megatron.passes import Passes
from grpo_megatron.megatron.results import AdamOptions, StepOutcome
from grpo_megatron.megatron.trained_model import TrainedModel
from grpo_megatron.metrics import Metrics


class AccumulatedGradients:
    """Gradients of a policy that several calls of `add` add up, and the optimizer step on them (`step`).

    All ranks must call each method. Until `step`, each data-parallel replica has the gradients of its own
    sequences. `step` first adds up those of all replicas.
    """

    def __init__(self, model: TrainedModel, passes: Passes):
        """Create the object. There are no gradients until `add` is called.

        passes: runs the forward and backward passes.
        """
        self._model, self._passes = model, passes
        self._is_empty = True

    def add(
        self, micro_batches: list[TrainBatch], loss: TokenLoss, num_tokens: int, current_is_old: bool
    ) -> tuple[Metrics, np.ndarray] | None:
        """Add the gradient of the weighted loss, summed over the sequences of all replicas, to the others.

        One rank of each data-parallel replica returns (metrics, log-probs). The log-probs are float32 [T], in
        the order of the micro-batches; tokens that are not trained have 0. The other ranks return None.

        micro_batches: the sequences of this rank's replica, with weights and what the loss needs.
        num_tokens: number of tokens of this call over all replicas. The auxiliary losses of MoE routers are
            means over these tokens.
        current_is_old: if True, the current log-probs serve as the old policy's, so that the ratio is 1.
        """
        if self._is_empty:
            self._passes.zero_gradients()
            self._is_empty = False
        with _not_reduced(self._model.ddp, 1 / num_tokens):
            metrics, logp = self._passes.backward(
                micro_batches, loss, num_tokens, current_is_old, keep_logprobs=True
            )
        return (metrics, logp) if self._model.rank.reports else None

    def discard(self) -> None:
        """Forget all gradients. All ranks must call this."""
        self._is_empty = True

    def step(self, adam: AdamOptions, drop: bool) -> StepOutcome:
        """Take one optimizer step on the gradients, and discard them. All ranks return the outcome.

        drop: if True, drop the step, so that no weight changes.

        Raises RuntimeError if there are no gradients.
        """
        if self._is_empty:
            raise RuntimeError("an optimizer step needs the gradients of at least one call of `add`")
        self._is_empty = True
        _reduce(self._model.ddp)
        return self._passes.step(drop, adam)


@contextmanager
def _not_reduced(chunks: list[DistributedDataParallel], scale: float) -> Iterator[None]:
    """Enter a context in which backward passes leave each replica's own gradients, without adding them up.

    Megatron's schedules would otherwise add them up over the replicas at the end of each call. The next call
    would then add its gradients to the sum, and the sum would be added up again.

    scale: factor of all gradients within the context, in place of Megatron's division by the token count.
    """
    config = chunks[0].config
    before = config.finalize_model_grads_func, config.no_sync_func, config.grad_scale_func
    config.finalize_model_grads_func, config.no_sync_func = None, None
    config.grad_scale_func = lambda value: value * scale
    try:
        with ExitStack() as own:
            for chunk in chunks:
                own.enter_context(chunk.no_sync())
            yield
    finally:
        config.finalize_model_grads_func, config.no_sync_func, config.grad_scale_func = before


@torch.no_grad()
def _reduce(chunks: list[DistributedDataParallel]) -> None:
    """Add up the gradients of all replicas, as Megatron's schedules do at the end of a training step."""
    for chunk in chunks:
        for group in chunk.bucket_groups + chunk.expert_parallel_bucket_groups:
            # With megatron.overlap, a backward pass would have started this communication, except in the
            # first step, in which finalize_model_grads starts it.
            if chunk.ddp_config.overlap_grad_reduce and not group.is_first_batch:
                group.start_grad_sync()
    finalize_model_grads(chunks)
