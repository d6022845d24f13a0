"""Micro-batches as inputs of the model on one rank, and a store that keeps them from one pass to the next."""

from dataclasses import dataclass, field, replace

import numpy as np
import torch
from megatron.core import parallel_state as mpu

from grpo_megatron.algorithm.losses import LossInputs
from grpo_megatron.algorithm.preferences import PairInputs
from grpo_megatron.batch.layout import Layout, Pack, on_device, padded_to
from grpo_megatron.batch.train_batch import TrainBatch
from grpo_megatron.config.derived import pack_limit
from grpo_megatron.config.fp8 import FP8Recipe
from grpo_megatron.config.schema import Config, MegatronConfig, Precision, RoutingReplay
from grpo_megatron.megatron.layers.attention import PackedSequences, describe_pack
from grpo_megatron.megatron.layers.router import Routing
from grpo_megatron.megatron.memory.host import HostArena
from grpo_megatron.model.architecture import MoE


@dataclass
class MicroBatch:
    """One micro-batch on one rank, with t tokens (this CP rank's part, padding included).

    Tensors are on the rank's device.
    """

    pack: Pack
    """Mapping between the micro-batch's T tokens and this rank's t padded ones."""
    packed: PackedSequences
    """Description of the pack for Megatron and PackedAttention."""
    tokens: torch.Tensor
    """int64 [1, t]: token ids."""
    position_ids: torch.Tensor
    """int64 [1, t]: position of each token in its sequence."""
    padding: torch.Tensor
    """bool [1, t]: True on padding."""
    target: torch.Tensor
    """int64 [t]: the token to predict at each position."""
    weight: torch.Tensor | None = None
    """float32 [t]: weight of each token's loss. None until `set_loss_inputs`."""
    trained: torch.Tensor | None = None
    """int64 [n]: positions whose loss counts. The training pass computes the head for these only."""
    inputs: LossInputs | PairInputs | None = None
    """Further inputs of the loss: LossInputs of a policy, PairInputs of a reward model."""
    routing: dict[int, torch.Tensor] | None = None
    """{layer: int64 [t, k]}: experts of each token, under SP this rank's share. None: routers choose."""
    reference_hidden: torch.Tensor | None = None
    """[t, h], under SP this rank's share: the reference's last hidden states, on the device or the host.

    Only the last stage has them.
    """

    def hidden_of_reference(self) -> torch.Tensor:
        """Return reference_hidden on the device, for the exact KL. Raises RuntimeError if it was not kept."""
        if self.reference_hidden is None:
            raise RuntimeError(
                "the exact KL needs logprobs(reference=True, keep_hidden=True) before train_step"
            )
        return self.reference_hidden.to(self.target.device, non_blocking=True)


def rank_layout(config: Config, cp_rank: int) -> Layout:
    """Return how packs of sequences are padded and split on a rank with this CP rank."""
    megatron = config.megatron
    layout = Layout(
        megatron.tensor_parallel,
        megatron.context_parallel,
        cp_rank,
        megatron.sequence_parallel,
        _fp8_alignment(megatron),
    )
    tokens = pack_limit(config) if config.train.constant_length_packs else 0
    return replace(layout, pack_tokens=padded_to(tokens, layout.pack_multiple))


def _fp8_alignment(megatron: MegatronConfig) -> int:
    """Return the multiple to which the tokens of a pack, and each rank's part of it, must be padded for FP8.

    Without FP8 it is 1.
    """
    if megatron.precision != Precision.fp8:
        return 1
    return {FP8Recipe.blockwise: 128, FP8Recipe.mxfp8: 32}.get(megatron.fp8.recipe, 16)


def lay_out(batch: TrainBatch, layout: Layout, device: torch.device, own_attention: bool) -> MicroBatch:
    """Build the model's input for one micro-batch: pad its sequences and take this rank's part.

    own_attention: True: PackedAttention computes attention. False: TransformerEngine does.
    """
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
    """Store the inputs of a policy's loss in the micro-batch, such as advantages and old log-probs.

    This is separate from `lay_out`, because they are known only after the passes that compute log-probs.
    current_is_old: store no old log-probs; the loss then takes the current ones in their place.
    """
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
    """Return the indices, in this rank's part of the pack, of the tokens where the mask is True.

    If there is none, return index 0, because the head's collectives need at least one token.
    """
    positions = pack.local_positions(mask)
    return positions if len(positions) else torch.zeros(1, dtype=torch.int64)


def set_pair_inputs(micro_batch: MicroBatch, batch: TrainBatch) -> None:
    """Store the inputs of a reward model's loss in the micro-batch: weight and margin of each pair.

    batch: sequence 2i is the chosen one of pair i, sequence 2i + 1 the rejected one.
    """
    device, ends = micro_batch.target.device, batch.cu_seqlens[1:] - 1
    weight = batch.weight[ends].reshape(-1, 2).sum(1)
    margin = batch.reward[0::2] - batch.reward[1::2]
    micro_batch.inputs = PairInputs(
        *(on_device(torch.from_numpy(values), device) for values in (weight, margin))
    )


def set_routing_from(micro_batch: MicroBatch, batch: TrainBatch, layers: tuple[bool, ...]) -> None:
    """Store the engine's choice of experts for this rank's tokens, so that the trainer replays it (R3).

    layers: for each layer of the model, True if it has experts.
    Raises ValueError if the samples carry no routing, or routing of another number of layers.
    """
    given = batch.routing
    if given is None:
        raise ValueError(
            "moe.routing_replay=engine needs the engine's routing of every sample, but the samples carry none"
        )
    if given.shape[1] != sum(layers):
        raise ValueError(
            f"the samples carry routing for {given.shape[1]} layers, the model has {sum(layers)} with experts"
        )
    # Padding needs k different experts too. Their results are not used.
    anything = np.arange(given.shape[2], dtype=given.dtype)
    local = on_device(micro_batch.pack.scatter(given, fill=anything), micro_batch.target.device).long()
    local = micro_batch.pack.layout.tensor_parallel_share(local, mpu.get_tensor_model_parallel_rank())
    with_experts = [layer for layer, has_experts in enumerate(layers) if has_experts]
    micro_batch.routing = {layer: local[:, i].contiguous() for i, layer in enumerate(with_experts)}


@dataclass
class MiniBatchStore:
    """Store of one step's micro-batches, so that each is prepared once for all passes over it.

    The caller's key of a mini-batch is (step, index of the mini-batch). The first key of another step empties
    the store.
    """

    layout: Layout
    """Padding and split of packs on this rank."""
    device: torch.device
    """Device of the micro-batches' tensors."""
    own_attention: bool
    """True: PackedAttention computes attention. False: TransformerEngine does."""
    _kept: dict[tuple[int, int], list[MicroBatch]] = field(default_factory=dict)
    """{key: micro-batches}."""
    _hidden_on_device: int = 0
    """Bytes of the reference's hidden states that are kept on the device."""
    _hidden_on_host: HostArena = field(default_factory=HostArena)
    """Host memory for hidden states that exceed the device's budget."""

    def get(self, key: tuple[int, int] | None, batches: list[TrainBatch]) -> list[MicroBatch]:
        """Return the prepared micro-batches of a mini-batch; prepare them at the first call with this key.

        key: None: prepare them for this call only.
        Raises ValueError if `batches` are divided otherwise than at the first call.
        """
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
            raise ValueError(f"mini-batch {key} is divided into other micro-batches than in its first pass")
        return kept

    def keep_hidden(self, micro_batch: MicroBatch, hidden: torch.Tensor, on_device: int) -> None:
        """Keep the reference's hidden states [t, h] in the micro-batch, for the exact KL in training.

        on_device: most bytes that the hidden states of all mini-batches may take on the device. Further ones
            are kept on the host.
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
    """Decide where the policy's choice of experts comes from in a pass, as moe.routing_replay says.

    With moe.routing_replay=engine, this also stores the engine's choice in the micro-batches that lack it.
    recording: True in the pass that computes the old log-probs, whose choice old_policy records.
    Raises ValueError if moe.routing_replay=old_policy and that pass has not run before a training pass.
    """
    if moe is None or replay == RoutingReplay.off:
        return Routing.own
    if replay == RoutingReplay.old_policy:
        if not recording and any(kept.routing is None for kept in prepared):
            raise ValueError(
                "moe.routing_replay=old_policy: compute the old log-probs first, to record the routing"
            )
        return Routing.record if recording else Routing.given
    for kept, batch in zip(prepared, micro_batches, strict=True):
        if kept.routing is None:
            set_routing_from(kept, batch, moe.layers)
    return Routing.given
