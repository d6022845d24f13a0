"""Micro-batches as model inputs on one rank, and a store that keeps them from one pass to the next."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

import numpy as np
import torch
from megatron.core import parallel_state as mpu

from grpo_megatron.algorithm.losses import LossInputs, TokenInputs
from grpo_megatron.algorithm.preferences import PairInputs
from grpo_megatron.batch.examples import ExampleBatch
from grpo_megatron.batch.layout import Layout, Pack, on_device, padded_to
from grpo_megatron.batch.pairs import PairBatch
from grpo_megatron.batch.token_stream import TokenStream
from grpo_megatron.batch.train_batch import TrainBatch
from grpo_megatron.config.derived import pack_limit
from grpo_megatron.config.fp8 import FP8Recipe
from grpo_megatron.config.schema import Config, MegatronConfig, Precision, RoutingReplay
from grpo_megatron.megatron.layers.packs import PackedSequences, describe_pack
from grpo_megatron.megatron.layers.router import Routing
from grpo_megatron.megatron.memory.host import HostArena
from grpo_megatron.model.architecture import MoE


@dataclass
class MicroBatch:
    """Inputs of the model and of the loss for one micro-batch, as tensors on one rank's device.

    In the shapes of the fields, t is the number of tokens of this context-parallel (CP) rank, padding
    included. T is the number of tokens of the micro-batch over all CP ranks, without padding.
    """

    pack: Pack
    """Mapping between the T tokens of the micro-batch and this rank's t tokens."""
    packed: PackedSequences
    """Lengths and positions of the sequences, as attention layers need them."""
    tokens: torch.Tensor
    """int64 [1, t]: token ids."""
    position_ids: torch.Tensor
    """int64 [1, t]: position of each token in its sequence."""
    padding: torch.Tensor
    """bool [1, t]: True for tokens that are padding."""
    target: torch.Tensor
    """int64 [t]: id of the token that each position predicts."""
    first_token: int
    """Number of tokens of the mini-batch's earlier micro-batches on this replica, without padding."""
    weight: torch.Tensor | None = None
    """float32 [t]: weight of each token's loss. None before the training pass, and for a reward model."""
    trained: torch.Tensor | None = None
    """int64 [n]: indices, among the t tokens, of the tokens whose loss counts; [0] if there are none.

    The training pass computes log-probs of these tokens only. None until `set_trained` sets the field.
    """
    inputs: TokenInputs | PairInputs | None = None
    """Further inputs of the loss: LossInputs for a policy, TokenInputs for supervised training, PairInputs
    for a reward model. None before the training pass."""
    routing: dict[int, torch.Tensor] | None = None
    """{layer index: int64 [t, k]}: stored choice of the k experts of each token. None: no choice is stored.

    With sequence parallelism, the tensors have only the t / tp tokens of this TP rank.
    """
    reference_hidden: torch.Tensor | None = None
    """[t, h]: last hidden states of the reference model, in device or host memory, on the last stage only.

    With sequence parallelism, the shape is [t / tp, h].
    """
    logp: torch.Tensor | None = None
    """float32 [t]: log-probs of the newest training pass, if it was asked to keep them."""

    def hidden_of_reference(self) -> torch.Tensor:
        """Return the reference model's last hidden states for this micro-batch, on the device.

        The exact KL is computed from them. The shape is [t, h] for this rank's t tokens; with sequence
        parallelism [t / tp, h]. Raises RuntimeError if no pass of the reference model has stored them in
        `reference_hidden`.
        """
        if self.reference_hidden is None:
            raise RuntimeError(
                "the exact KL needs logprobs(reference=True, keep_hidden=True) before train_step"
            )
        return self.reference_hidden.to(self.target.device, non_blocking=True)


def rank_layout(config: Config, cp_rank: int) -> Layout:
    """Return the rules by which a rank pads a micro-batch's sequences and takes its part of them.

    With train.constant_length_packs, every micro-batch is padded to the same number of tokens.

    cp_rank: the rank's index in its context-parallel (CP) group.
    """
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
    """Return the number that FP8 kernels require a rank's token count to be a multiple of. Without FP8: 1."""
    if megatron.precision != Precision.fp8:
        return 1
    return {FP8Recipe.blockwise: 128, FP8Recipe.mxfp8: 32}.get(megatron.fp8.recipe, 16)


def lay_out(
    stream: TokenStream, layout: Layout, device: torch.device, own_attention: bool, first_token: int = 0
) -> MicroBatch:
    """Prepare one micro-batch as model input: pad its sequences, take this rank's part, copy it to `device`.

    The fields that only the loss needs stay None. Other functions set them before the training pass.

    stream: the micro-batch's sequences.
    layout: rules for padding and for this rank's part.
    own_attention: True if this project's PackedAttention computes attention, False if TransformerEngine does.
    first_token: number of tokens of the mini-batch's earlier micro-batches on this replica, without padding.
    """
    pack = layout.pack(stream.lengths)
    return MicroBatch(
        pack=pack,
        packed=describe_pack(pack, device, own_attention=own_attention),
        tokens=on_device(pack.scatter(stream.tokens), device).long()[None],
        position_ids=pack.tensor("position_ids", device)[None],
        padding=on_device(torch.from_numpy(pack.index < 0), device)[None],
        target=on_device(pack.scatter(stream.target), device).long(),
        first_token=first_token,
    )


def set_loss_inputs(micro_batch: MicroBatch, batch: TrainBatch, current_is_old: bool) -> None:
    """Set the fields of a micro-batch that a policy's loss needs: `weight`, `trained` and `inputs`.

    Call this just before the training pass. Advantages and old log-probs are not known when the micro-batch
    is created for the log-prob passes.

    batch: the samples of this micro-batch, with their advantages and log-probs.
    current_is_old: if True, the loss uses the current log-probs in place of the old log-probs.
    """
    pack, device = micro_batch.pack, micro_batch.target.device
    group = mpu.get_context_parallel_group()

    def local(array: np.ndarray) -> torch.Tensor:
        return on_device(pack.scatter(array), device)

    sequence_id = pack.tensor("sequence_id", device)
    micro_batch.weight = local(batch.weight)
    set_trained(micro_batch, batch.loss_mask)
    micro_batch.inputs = LossInputs(
        mask=local(batch.loss_mask),
        advantage=local(batch.advantage),
        rollout_logp=local(batch.rollout_logp),
        ref_logp=local(batch.ref_logp),
        old_logp=None if current_is_old else local(batch.old_logp),
        sequence_sum=lambda values: pack.sequence_sum(values, group)[sequence_id],
        policy_factor=None if batch.policy_factor is None else local(batch.policy_factor),
        age=None if batch.age is None else local(batch.age),
        token_index=micro_batch.first_token + pack.tensor("index", device),
    )


def set_trained(micro_batch: MicroBatch, mask: np.ndarray) -> None:
    """Set the field `trained` of a micro-batch to the indices of this rank's tokens whose mask is True.

    If this rank has no such token, the field becomes [0], the index of the first token, because the output
    head's collectives need at least one token.

    mask: bool [T], True for each token whose loss counts. T is the number of tokens over all CP ranks,
        without padding.
    """
    positions = micro_batch.pack.local_positions(mask)
    if not len(positions):
        positions = torch.zeros(1, dtype=torch.int64)
    micro_batch.trained = on_device(positions, micro_batch.target.device)


def set_example_inputs(micro_batch: MicroBatch, batch: ExampleBatch) -> None:
    """Set the fields `weight`, `trained` and `inputs` of a micro-batch, for supervised training.

    The trained tokens are the tokens whose weight in `batch` is not 0.
    """
    pack, device = micro_batch.pack, micro_batch.target.device
    mask = batch.weight != 0
    micro_batch.weight = on_device(pack.scatter(batch.weight), device)
    set_trained(micro_batch, mask)
    micro_batch.inputs = TokenInputs(on_device(pack.scatter(mask), device))


def set_pair_inputs(micro_batch: MicroBatch, batch: PairBatch) -> None:
    """Set the field `inputs` of a micro-batch for a reward model's loss: weight and margin of each pair."""
    device = micro_batch.target.device
    micro_batch.inputs = PairInputs(
        *(on_device(torch.from_numpy(values), device) for values in (batch.weight, batch.margin))
    )


def set_routing_from(micro_batch: MicroBatch, stream: TokenStream, moe: MoE, layers: Sequence[int]) -> None:
    """Set the field `routing` of a micro-batch to the experts that the rollout engine chose for its tokens.

    The trainer then uses the same experts as the engine (rollout routing replay, R3).

    stream: the sequences of the micro-batch. Its `routing` is the engine's choice of experts, for all layers
        with experts or only for `layers`.
    moe: description of the model's experts.
    layers: this rank's layers with experts, as indices among all layers, in increasing order.

    Raises ValueError if the stream has no routing, or routing for another number of layers.
    """
    given = stream.routing
    if given is None:
        raise ValueError(
            "moe.routing_replay=engine needs the engine's routing of every sample, but the samples have "
            "none; set moe.routing_replay=old_policy or moe.routing_replay=off"
        )
    if given.shape[1] == sum(moe.layers):
        given = given[:, list(moe.routed(layers))]
    elif given.shape[1] != len(layers):
        raise ValueError(
            f"the samples have routing for {given.shape[1]} layers, but {sum(moe.layers)} layers of the "
            "model have experts"
        )
    # Padding needs k different experts too. Their results are not used.
    anything = np.arange(given.shape[2], dtype=given.dtype)
    local = on_device(micro_batch.pack.scatter(given, fill=anything), micro_batch.target.device).long()
    local = micro_batch.pack.layout.tensor_parallel_share(local, mpu.get_tensor_model_parallel_rank())
    micro_batch.routing = {layer: local[:, i].contiguous() for i, layer in enumerate(layers)}


@dataclass
class PreparedStore:
    """Cache of a training step's micro-batches as prepared model inputs, so that each is prepared only once.

    All passes over a mini-batch (old log-probs, reference, training) get the same prepared micro-batches. The
    key of a mini-batch is (step, index of the mini-batch within the step). A key of another step empties the
    cache.
    """

    layout: Layout
    """Rules by which this rank pads sequences and takes its part of the tokens."""
    device: torch.device
    """Device of the micro-batches' tensors."""
    own_attention: bool
    """True if PackedAttention computes attention, False if TransformerEngine does."""
    _kept: dict[tuple[int, int], list[MicroBatch]] = field(default_factory=dict)
    """{key: prepared micro-batches of the mini-batch}."""
    _hidden_on_device: int = 0
    """Bytes of the reference's hidden states that are kept in device memory."""
    _hidden_on_host: HostArena = field(default_factory=HostArena)
    """Host memory for the reference's hidden states that exceed the limit for device memory."""

    def get(self, key: tuple[int, int] | None, streams: Sequence[TokenStream]) -> list[MicroBatch]:
        """Return a mini-batch's micro-batches as model inputs. Prepare them if the cache does not have them.

        key: (step, index of the mini-batch within the step). None: prepare the micro-batches without using
            the cache.
        streams: the sequences of each micro-batch.

        Raises ValueError if the first call with this key divided the sequences into other micro-batches.
        """
        if key is None:
            firsts = accumulate((stream.num_tokens for stream in streams), initial=0)
            return [
                lay_out(stream, self.layout, self.device, self.own_attention, first)
                for stream, first in zip(streams, firsts, strict=False)
            ]
        if any(step != key[0] for step, _ in self._kept):
            self.clear()
        if key not in self._kept:
            self._kept[key] = self.get(None, streams)
        kept = self._kept[key]
        same = len(kept) == len(streams) and all(
            np.array_equal(own.pack.lengths[own.pack.lengths > 0], stream.lengths)
            for own, stream in zip(kept, streams, strict=True)
        )
        if not same:
            raise ValueError(
                f"mini-batch {key} is divided into different micro-batches than in its first pass; "
                "use the same micro-batches in all passes of a step"
            )
        return kept

    def keep_hidden(self, micro_batch: MicroBatch, hidden: torch.Tensor, device_limit: int) -> None:
        """Copy the reference's hidden states to micro_batch.reference_hidden. The exact KL needs them later.

        hidden: last hidden states of the reference model, [t, h]; with sequence parallelism [t / tp, h].
        device_limit: maximum number of bytes of device memory for the hidden states of all micro-batches in
            this store. Hidden states beyond this limit are copied to host memory.
        """
        if self._hidden_on_device + hidden.nbytes <= device_limit:
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
    layers: Sequence[int],
    prepared: list[MicroBatch],
    streams: Sequence[TokenStream],
    recording: bool,
) -> Routing:
    """Return the source from which a forward pass of the policy takes each token's experts.

    The value of moe.routing_replay decides:

    - off, or a model without experts: the routers choose the experts (Routing.own).
    - engine: the pass uses the choice of the rollout engine (Routing.given). This function copies the choice
      from `streams` into those micro-batches that have no stored choice yet.
    - old_policy: the pass for the old log-probs records the routers' choice (Routing.record). Training passes
      reuse it (Routing.given).

    replay: value of moe.routing_replay.
    moe: description of the model's experts; None if the model has none.
    layers: this rank's layers with experts, as indices among all layers, in increasing order.
    prepared: the micro-batches as model inputs.
    streams: the sequences of each micro-batch, from which `prepared` was made.
    recording: True in the pass for the old log-probs, False in a training pass.

    Raises ValueError with `old_policy` in a training pass if no choice is recorded, and with `engine` if
    `streams` have no routing or routing for another number of layers.
    """
    if moe is None or replay == RoutingReplay.off:
        return Routing.own
    if replay == RoutingReplay.old_policy:
        if not recording and any(kept.routing is None for kept in prepared):
            raise ValueError(
                "moe.routing_replay=old_policy: compute the old log-probs first, to record the routing"
            )
        return Routing.record if recording else Routing.given
    for kept, stream in zip(prepared, streams, strict=True):
        if kept.routing is None:
            set_routing_from(kept, stream, moe, layers)
    return Routing.given
