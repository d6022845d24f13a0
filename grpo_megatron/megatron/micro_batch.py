"""One micro-batch as a rank sees it, and what the rank keeps of it between the passes."""

from dataclasses import dataclass, field

import numpy as np
import torch
from megatron.core import parallel_state as mpu

from grpo_megatron.algorithm.losses import LossInputs
from grpo_megatron.algorithm.preferences import PairInputs
from grpo_megatron.batch.layout import Layout, Pack, on_device
from grpo_megatron.batch.train_batch import TrainBatch
from grpo_megatron.config.schema import RoutingReplay
from grpo_megatron.megatron.attention import PackedSequences, describe_pack
from grpo_megatron.megatron.host_memory import HostArena
from grpo_megatron.megatron.router import Routing
from grpo_megatron.model.architecture import MoE


@dataclass
class MicroBatch:
    """t local positions, on the rank's device.

    padding: True on padding. trained: the positions whose loss counts, known once the loss inputs are set; the training pass
    computes the head for these alone. routing: {layer: int64 [t, k]} (under SP this rank's share of t), the experts of each token
    to be used; None: the routers' choice. reference_hidden: the reference model's last hidden states, [t, h] (or that share),
    on the last stage; on the device or the host.
    """

    pack: Pack
    packed: PackedSequences
    tokens: torch.Tensor  # int64 [1, t]
    position_ids: torch.Tensor  # int64 [1, t]
    padding: torch.Tensor  # bool [1, t]
    target: torch.Tensor  # int64 [t]
    weight: torch.Tensor | None = None  # float32 [t]
    trained: torch.Tensor | None = None  # int64 [n]
    inputs: LossInputs | PairInputs | None = None
    routing: dict[int, torch.Tensor] | None = None
    reference_hidden: torch.Tensor | None = None

    def hidden_of_reference(self) -> torch.Tensor:
        """reference_hidden on the device. Raises RuntimeError if no pass of the reference kept them."""
        if self.reference_hidden is None:
            raise RuntimeError("the exact KL needs a pass of the reference that keeps its hidden states")
        return self.reference_hidden.to(self.target.device, non_blocking=True)


def lay_out(batch: TrainBatch, layout: Layout, device: torch.device, own_attention: bool) -> MicroBatch:
    """What the model's input is made of. own_attention: with the plan PackedAttention needs."""
    pack = layout.pack(batch.lengths)
    return MicroBatch(
        pack=pack,
        packed=describe_pack(pack, device, own_attention=own_attention),
        tokens=on_device(pack.scatter(batch.tokens), device).long()[None],
        position_ids=pack.tensor("position_ids", device)[None],
        padding=on_device(torch.from_numpy(pack.index < 0), device)[None],
        target=on_device(pack.scatter(batch.target), device).long(),
    )


def set_loss_inputs(micro_batch: MicroBatch, batch: TrainBatch, current_is_old: bool) -> None:
    """Everything the loss needs, which is known after the log-prob passes only."""
    pack, device = micro_batch.pack, micro_batch.target.device
    group = mpu.get_context_parallel_group()

    def local(array: np.ndarray) -> torch.Tensor:
        return on_device(pack.scatter(array), device)

    sequence_id = pack.tensor("sequence_id", device)
    micro_batch.weight = local(batch.weight)
    micro_batch.trained = on_device(_trained_positions(pack, batch.loss_mask), device)
    micro_batch.inputs = LossInputs(
        mask=local(batch.loss_mask),
        advantage=local(batch.advantage),
        rollout_logp=local(batch.rollout_logp),
        ref_logp=local(batch.ref_logp),
        old_logp=None if current_is_old else local(batch.old_logp),
        sequence_sum=lambda values: pack.sequence_sum(values, group)[sequence_id],
        policy_factor=None if batch.policy_factor is None else local(batch.policy_factor),
        number=None if batch.number is None else local(batch.number),
    )


def _trained_positions(pack: Pack, mask: np.ndarray) -> torch.Tensor:
    """Return the local positions at which the mask is true. Without any, return the first: collectives need a token."""
    positions = pack.local_positions(mask)
    return positions if len(positions) else torch.zeros(1, dtype=torch.int64)


def set_pair_inputs(micro_batch: MicroBatch, batch: TrainBatch) -> None:
    """What the loss of a reward model needs. batch: see data.preferences.pair_batch."""
    device, ends = micro_batch.target.device, batch.cu_seqlens[1:] - 1
    weight = batch.weight[ends].reshape(-1, 2).sum(1)
    margin = batch.reward[0::2] - batch.reward[1::2]
    micro_batch.inputs = PairInputs(
        *(on_device(torch.from_numpy(values), device) for values in (weight, margin))
    )


def set_routing_from(micro_batch: MicroBatch, batch: TrainBatch, layers: tuple[bool, ...]) -> None:
    """The engine's routing (R3) for this rank's tokens; layers: which have experts."""
    given = batch.routing
    if given is None:
        raise ValueError(
            "moe.routing_replay=engine needs the engine's routing of every sample, but the samples carry none"
        )
    if given.shape[1] != sum(layers):
        raise ValueError(
            f"the samples carry routing for {given.shape[1]} layers, the model has {sum(layers)} with experts"
        )
    # Padding needs experts too, different ones; what they compute is used by nobody.
    anything = np.arange(given.shape[2], dtype=given.dtype)
    local = on_device(micro_batch.pack.scatter(given, fill=anything), micro_batch.target.device).long()
    local = micro_batch.pack.layout.tensor_parallel_share(local, mpu.get_tensor_model_parallel_rank())
    with_experts = [layer for layer, has_experts in enumerate(layers) if has_experts]
    micro_batch.routing = {layer: local[:, i].contiguous() for i, layer in enumerate(with_experts)}


@dataclass
class MiniBatchStore:
    """The micro-batches of the mini-batches of one step, laid out once, by the caller's key.

    A key is (step, number of the mini-batch); the first key of another step empties the store.
    """

    layout: Layout
    device: torch.device
    own_attention: bool
    _kept: dict[tuple[int, int], list[MicroBatch]] = field(default_factory=dict)
    _hidden_on_device: int = 0  # bytes
    _hidden_on_host: HostArena = field(default_factory=HostArena)

    def get(self, key: tuple[int, int] | None, batches: list[TrainBatch]) -> list[MicroBatch]:
        """The micro-batches of this mini-batch; key None: laid out for this call alone."""
        if key is None:
            return [lay_out(batch, self.layout, self.device, self.own_attention) for batch in batches]
        if any(step != key[0] for step, _ in self._kept):
            self.clear()
        if key not in self._kept:
            self._kept[key] = self.get(None, batches)
        kept = self._kept[key]
        same = len(kept) == len(batches) and all(
            np.array_equal(k.pack.lengths[k.pack.lengths > 0], b.lengths)
            for k, b in zip(kept, batches, strict=True)
        )
        if not same:
            raise ValueError(
                f"mini-batch {key} has another partition into micro-batches than in its first pass"
            )
        return kept

    def keep_hidden(self, micro_batch: MicroBatch, hidden: torch.Tensor, on_device: int) -> None:
        """Keep the reference's hidden states [t, h] with a micro-batch until the store is emptied.

        on_device: most bytes that those of all mini-batches may take there; what is beyond waits on the host.
        """
        if self._hidden_on_device + hidden.nbytes <= on_device:
            self._hidden_on_device += hidden.nbytes
            micro_batch.reference_hidden = hidden.clone()
        else:
            micro_batch.reference_hidden = self._hidden_on_host.like(hidden)
            micro_batch.reference_hidden.copy_(hidden, non_blocking=True)

    def clear(self) -> None:
        self._kept.clear()
        self._hidden_on_device = 0
        self._hidden_on_host.clear()


def choose_routing(
    replay: RoutingReplay,
    moe: MoE | None,
    prepared: list[MicroBatch],
    micro_batches: list[TrainBatch],
    recording: bool,
) -> Routing:
    """Whose routing the policy follows in a pass; that of the engines is put into the micro-batches that lack it.

    recording: it is the pass for the old log-probs. Raises ValueError where that pass should have come first.
    """
    if moe is None or replay == RoutingReplay.off:
        return Routing.own
    if replay == RoutingReplay.old_policy:
        if not recording and any(kept.routing is None for kept in prepared):
            raise ValueError(
                "moe.routing_replay=old_policy: no routing was recorded, the old log-probs come first"
            )
        return Routing.record if recording else Routing.given
    for kept, batch in zip(prepared, micro_batches, strict=True):
        if kept.routing is None:
            set_routing_from(kept, batch, moe.layers)
    return Routing.given
