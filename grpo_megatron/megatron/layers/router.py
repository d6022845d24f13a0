"""Router of layers with experts. Its choice of experts can be recorded and replayed.

Replay lets the trainer use the same experts as the engine, or in training the same as for the old log-probs.
"""

from collections import deque
from collections.abc import Iterator
from enum import Enum

import torch
from megatron.core.transformer.moe.moe_utils import (
    MoEAuxLossAutoScaler,
    get_tokens_per_expert_and_token_count,
    switch_load_balancing_loss_func,
)
from megatron.core.transformer.moe.router import TopKRouter


class Routing(Enum):
    """Source of the choice of experts in a pass over micro-batches.

    own: the routers choose.
    record: the routers choose, and the choice is stored in the micro-batch.
    given: the choice that is stored in the micro-batch is used again.
    """

    own = "own"
    record = "record"
    given = "given"


class _Choice:
    """Recorder of one router's choice of experts, which can also make the router use a given choice.

    It has the interface of Megatron's `router_replay`.
    given: int64 [t, k], experts to use in the next forward pass. None: the router chooses.
    record: if True, the next forward pass stores its choice in `recorded`, int64 [t, k].
    """

    def __init__(self):
        self.given: torch.Tensor | None = None
        self.record = False
        self.training = False
        self.recorded: torch.Tensor | None = None
        self._to_recompute: deque[torch.Tensor] = deque()

    def get_replay_topk(self, scores, topk, num_groups=None, group_topk=None, default_compute_topk=None):
        """Return (scores of the k chosen experts of each token [t, k], indices of these experts [t, k]).

        Megatron's router calls this instead of its own top-k function.
        scores: scores of all experts, [t, experts].
        default_compute_topk: Megatron's own top-k function.
        """
        indices = self._given_to_this_pass()
        if indices is None:
            values, indices = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        else:
            values = scores.gather(1, indices)
        if self.record:
            self.recorded = indices
        return values, indices

    def _given_to_this_pass(self) -> torch.Tensor | None:
        """Return the experts to use in this pass, int64 [t, k], or None if the router chooses.

        A backward pass that recomputes activations must use the same experts as the forward pass of the same
        micro-batch. By then `given` belongs to a later micro-batch, and Megatron does not say which
        micro-batch it recomputes. But a stage runs its backward passes in the order of its forward passes, so
        a queue returns the right experts. Megatron recomputes exactly the training forward passes that run
        without gradients, so these passes put their experts into the queue.
        """
        if self.given is None:
            return None
        if not torch.is_grad_enabled():
            if self.training:
                self._to_recompute.append(self.given)
            return self.given
        return self._to_recompute.popleft() if self._to_recompute else self.given

    def clear(self) -> None:
        self.given = self.recorded = None
        self.record = False
        self._to_recompute.clear()


class Router(TopKRouter):
    """Megatron's top-k router, extended in two ways.

    A recorded choice of experts can be replayed. And the auxiliary losses do not depend on the parallel
    layout: the training loss contains the sum of (T / M) * loss over the step's micro-batches, with T the
    micro-batch's tokens over all TP and CP ranks, and M the tokens of the step. Megatron's own T counts the
    tokens of one rank, so its auxiliary losses shrink with the number of ranks under sequence or context
    parallelism.

    correction_bias: if True, the buffer `expert_bias`, float32 [experts], is added to the scores when experts
        are chosen, but not when they are weighted (arXiv:2408.15664). Training does not change this bias.
    """

    def __init__(self, config, pg_collection=None, *, correction_bias: bool = False):
        super().__init__(config=config, pg_collection=pg_collection)
        self.router_replay = _Choice()
        self.loss_sums: dict[str, torch.Tensor] = {}
        if correction_bias:
            # Megatron's own switch for the bias would also move it towards equal loads after every step.
            del self.expert_bias
            self.register_buffer("expert_bias", self.weight.new_zeros(len(self.weight), dtype=torch.float32))

    def _apply(self, fn, recurse=True):
        """Convert the dtype or device of the module by `fn`, but keep the correction bias in float32.

        Returns the module. With a rounded bias, the router would choose other experts than the engine does.
        """
        bias = self.expert_bias
        super()._apply(fn, recurse)
        if bias is not None:
            self.expert_bias = bias.to(self.expert_bias.device)
        return self

    def routing(self, logits, padding_mask=None):
        self.router_replay.training = self.training
        return super().routing(logits, padding_mask)

    def _add(self, name: str, value: torch.Tensor) -> None:
        self.loss_sums[name] = self.loss_sums.get(name, 0) + value.detach().float()

    def _apply_aux_loss(self, probs, scores_for_aux_loss, routing_map, with_padding_mask=False):
        coeff = self.get_aux_loss_coeff("aux_loss")
        if coeff == 0:
            return probs
        tokens_per_expert, _, tokens = get_tokens_per_expert_and_token_count(
            routing_map, self.tp_cp_group, topk=self.topk, with_padding_mask=with_padding_mask
        )
        # This rank's summand of the loss over all TP and CP ranks (arXiv:2101.03961 eq. 4).
        loss = switch_load_balancing_loss_func(
            probs=scores_for_aux_loss,
            tokens_per_expert=tokens_per_expert,
            total_num_tokens=tokens,
            topk=self.topk,
            num_experts=self.config.num_moe_experts,
            moe_aux_loss_coeff=coeff,
        )
        self._add("load_balancing_loss", loss * tokens / coeff)
        return MoEAuxLossAutoScaler.apply(probs, loss * tokens)

    def apply_z_loss(self, logits, padding_mask=None):
        coeff = self.config.moe_z_loss_coeff
        if coeff is None or not (self.training and torch.is_grad_enabled()):
            return logits
        squares = torch.logsumexp(logits.float(), dim=-1).square()  # arXiv:2202.08906 eq. 5
        total = (squares if padding_mask is None else squares * ~padding_mask).sum()
        self._add("z_loss", total)
        return MoEAuxLossAutoScaler.apply(logits, coeff * total)


def is_correction_bias(name: str) -> bool:
    """Return True if a buffer's name is that of a Router's correction bias, `expert_bias`."""
    return name.endswith(".router.expert_bias")


def routers(chunk) -> Iterator[tuple[int, Router]]:
    """Yield (layer index, router) of each layer with experts in a model chunk.

    The layer index counts from 0 in the whole model.
    """
    for layer in chunk.decoder.layers:
        router = getattr(layer.mlp, "router", None)
        if router is not None:
            yield layer.layer_number - 1, router


def set_routing(chunk, routing: Routing, given: dict[int, torch.Tensor] | None) -> None:
    """Tell the routers of a model chunk whether to choose, record or replay in the next forward pass.

    given: {layer index: int64 [t, k]}, experts of this rank's tokens. It is used with Routing.given only.
    """
    for layer, router in routers(chunk):
        router.router_replay.given = given[layer] if routing == Routing.given else None
        router.router_replay.record = routing == Routing.record


def recorded_routing(chunk) -> dict[int, torch.Tensor]:
    """Return {layer index: int64 [t, k]}: the experts that the last forward pass chose for each token.

    That pass must have run with Routing.record.
    """
    return {layer: router.router_replay.recorded for layer, router in routers(chunk)}


def take_loss_sums(chunks) -> dict[str, torch.Tensor]:
    """Return the sums of the routers' auxiliary losses, and reset these sums.

    Returns {"load_balancing_loss": sum, "z_loss": sum}, without the losses that were not computed. A sum is
    over this rank's layers and all micro-batches since the last call. This also clears the recorded choices
    of experts.
    """
    sums: dict[str, torch.Tensor] = {}
    for chunk in chunks:
        for _, router in routers(chunk):
            for name, value in router.loss_sums.items():
                sums[name] = sums.get(name, 0) + value
            router.loss_sums = {}
            router.router_replay.clear()
    return sums
