"""Forward and backward passes over micro-batches, run by Megatron's pipeline schedules.

Scaling: Megatron divides all gradients by the token count that loss functions return, summed over
micro-batches and ranks (``calculate_per_token_loss``). Let M be the number of tokens of the whole optimizer
step, and w and l the weight and the loss of a token. Our loss functions return ``M * sum w l`` and the number
of tokens of their micro-batch on this rank. These numbers add up to M, so ``sum w l`` remains after the
division. MoE auxiliary losses, which Megatron adds per token, are then scaled correctly too.
"""

from collections.abc import Callable, Iterator, Sequence

import torch
from megatron.core import parallel_state as mpu
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import unwrap_model

from grpo_megatron.megatron.head.objectives import Objective
from grpo_megatron.megatron.head.score import ScoreHead
from grpo_megatron.megatron.layers.router import Routing, recorded_routing, set_routing
from grpo_megatron.megatron.micro_batch import MicroBatch
from grpo_megatron.metrics import Metrics


def _run(
    chunks: list, micro_batches: list[MicroBatch], loss_func, forward_only: bool, routing: Routing
) -> list:
    """Run Megatron's pipeline schedule over the micro-batches: forward passes and optionally backward passes.

    chunks: model chunks of this rank, wrapped in DDP or Float16Module.
    loss_func: called on the last pipeline stage with (last hidden states, micro-batch). If forward_only is
        True, it may return any value, otherwise it returns (loss, token count, metrics).
    forward_only: if True, run no backward pass.
    routing: source of the experts that tokens are sent to. With Routing.record, the routers' choice of
        experts is stored in each micro-batch's field `routing`.

    Returns one item per micro-batch on the last pipeline stage: the result of loss_func if forward_only is
    True, otherwise the metrics. Returns an empty list on the other stages.
    """

    def forward_step(iterator: Iterator[MicroBatch], model):
        micro_batch = next(iterator)
        chunk = unwrap_model(model)
        padding = None
        if chunk.config.num_moe_experts:
            set_routing(chunk, routing, micro_batch.routing)
            # Megatron cuts the mask to a TP rank's share on the first stage only.
            padding = micro_batch.padding
            if not chunk.pre_process:
                tp_rank = mpu.get_tensor_model_parallel_rank()
                padding = micro_batch.pack.layout.tensor_parallel_share(padding[0], tp_rank)[None]
        hidden = model(
            micro_batch.tokens,
            micro_batch.position_ids,
            None,
            packed_seq_params=micro_batch.packed,
            padding_mask=padding,
        )
        if routing == Routing.record and chunk.config.num_moe_experts:
            micro_batch.routing = (micro_batch.routing or {}) | recorded_routing(chunk)
        return hidden, lambda output, non_loss_data=False: loss_func(output, micro_batch)

    iterators = [iter(micro_batches) for _ in chunks]
    return get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iterators if len(chunks) > 1 else iterators[0],
        model=chunks if len(chunks) > 1 else chunks[0],
        num_microbatches=len(micro_batches),
        # This is only a default: stages exchange the real shapes, unless all packs have the same length.
        seq_length=micro_batches[0].tokens.shape[1] * micro_batches[0].pack.layout.cp,
        micro_batch_size=1,
        forward_only=forward_only,
        collect_non_loss_data=forward_only,
    )


@torch.no_grad()
def forward_values(
    chunks: list,
    micro_batches: list[MicroBatch],
    compute: Callable[[torch.Tensor, MicroBatch], Sequence[torch.Tensor]],
    routing: Routing = Routing.own,
) -> list[torch.Tensor]:
    """Return values of the target tokens: one float32 tensor [n, T] per micro-batch, on the device.

    T is the micro-batch's number of tokens over all CP ranks, without padding. The list is empty except on
    the last pipeline stage.

    compute: function of the last hidden states and the micro-batch, such as a Head. It returns n tensors with
        one value for each of this rank's tokens, such as log-probs and entropies.
    routing: says whether MoE routers choose the experts, or reuse a recorded choice.
    """

    def collect(hidden: torch.Tensor, micro_batch: MicroBatch) -> torch.Tensor:
        group = mpu.get_context_parallel_group()
        return torch.stack([micro_batch.pack.gather(part, group) for part in compute(hidden, micro_batch)])

    return _run(chunks, micro_batches, collect, forward_only=True, routing=routing)


@torch.no_grad()
def forward_scores(chunks: list, micro_batches: list[MicroBatch], head: ScoreHead) -> list[torch.Tensor]:
    """Return a reward model's scores: one float32 tensor [S] per micro-batch of S sequences, on the device.

    The list is empty except on the last pipeline stage.
    """
    return _run(chunks, micro_batches, head, forward_only=True, routing=Routing.own)


def forward_backward(
    chunks: list,
    micro_batches: list[MicroBatch],
    objective: Objective,
    step_tokens: int,
    routing: Routing = Routing.own,
) -> list[Metrics]:
    """Run forward and backward passes, which leave the loss's gradient in DDP's gradient buffers.

    The gradient is that of the weighted loss, summed over all micro-batches of all data-parallel replicas.

    objective: function (hidden states, micro-batch) -> (weighted loss, metrics). The weighted loss is the sum
        of weight times loss over the micro-batch.
    step_tokens: number of tokens of the optimizer step over all replicas, padding excluded. Megatron divides
        the gradient by this number, so the loss is multiplied by it first.
    routing: says whether MoE routers choose the experts, or reuse a recorded choice.

    Returns the metrics of each micro-batch on the last pipeline stage, and an empty list on the other stages.
    """

    def compute(hidden: torch.Tensor, micro_batch: MicroBatch):
        total, metrics = objective(hidden, micro_batch)
        # The count is a CPU tensor, because Megatron adds up the counts on the host.
        share = torch.tensor(int((micro_batch.pack.index >= 0).sum()), dtype=torch.int)
        return total * step_tokens, share, metrics

    return _run(chunks, micro_batches, compute, forward_only=False, routing=routing)
