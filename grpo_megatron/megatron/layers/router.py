"""Router of mixture-of-experts (MoE) layers, whose choice of experts can be recorded and replayed.

With replay, the trainer uses the same experts as the rollout engine, or a training pass uses the same experts
as the pass that computed the old log-probs.
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
    """Source of the experts that tokens are sent to, in a pass over micro-batches.

    own: the routers choose the experts.
    record: the routers choose the experts, and the choice is stored in the micro-batch.
    given: the routers use the choice that is stored in the micro-batch.
    """

    own = "own"
    record = "record"
    given = "given"


class _Choice:
    """Recorder of the experts that one MoE router chooses. It can also replay recorded experts.

    It is the router's attribute `router_replay`. Megatron calls its method `get_replay_topk`.

    given: int64 [t, k], experts that the next forward pass must use. None: the router chooses.
    record: if True, the next forward pass stores its experts in `recorded`, int64 [t, k].
    training: True while the model is in training mode.
    """

    def __init__(self):
        self.given: torch.Tensor | None = None
        self.record = False
        self.training = False
        self.recorded: torch.Tensor | None = None
        self._to_recompute: deque[torch.Tensor] = deque()

    def get_replay_topk(self, scores, topk, num_groups=None, group_topk=None, default_compute_topk=None):
        """Choose k experts for each token. Return (scores of these experts [t, k], their indices [t, k]).

        Megatron's router calls this instead of its own top-k function.

        scores: scores of all experts, [t, experts].
        default_compute_topk: Megatron's own top-k function, used unless recorded experts are replayed.
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
        """Return the experts that this pass must use, int64 [t, k], or None if the router chooses.

        The experts are those in `given`, except in a recomputation. If activations are recomputed in the
        backward pass, `given` already belongs to a later micro-batch, and Megatron does not say which
        micro-batch it recomputes. But a stage runs its backward passes in the order of its forward passes, so
        a queue is enough: a training forward pass without gradients, which will be recomputed, appends its
        experts. A recomputation takes them out.
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
    """Megatron's top-k MoE router, plus replay of experts and corrected auxiliary losses.

    Replay: the router can use a recorded choice of experts instead of its own.

    Auxiliary losses do not depend on the parallel layout. The training loss contains the sum of (T / M) *
    loss over the step's micro-batches. T is the micro-batch's number of tokens over all TP and CP ranks, and
    M is the number of tokens of the step. Megatron's own T counts the tokens of one rank, so its auxiliary
    losses shrink with the number of ranks under sequence or context parallelism.

    correction_bias: if True, the buffer `expert_bias`, float32 [experts], is added to the scores when experts
        are chosen, but not when they are weighted (arXiv:2408.15664). Training does not change this bias.
    """

    def __init__(self, config, pg_collection=None, *, correction_bias: bool = False, **other):
        super().__init__(config=config, pg_collection=pg_collection, **other)
        self.router_replay = _Choice()
        self.loss_sums: dict[str, torch.Tensor] = {}
        if correction_bias:
            # Megatron's own option for this bias is not used: it changes the bias after every step.
            del self.expert_bias
            self.register_buffer("expert_bias", self.weight.new_zeros(len(self.weight), dtype=torch.float32))

    def _apply(self, fn, recurse=True):
        """Convert the module's dtype or device by `fn`, but keep the correction bias in float32.

        torch calls this method for every conversion, such as `.bfloat16()`. With a rounded bias, the router
        would choose other experts than the engine. Returns the module.
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
    """Return True if `name` is the full name of a Router's correction bias, the buffer `expert_bias`."""
    return name.endswith(".router.expert_bias")


def routers(chunk) -> Iterator[tuple[int, Router]]:
    """Yield (layer index, router) for each layer with experts in a model chunk.

    Layer indices count all layers of the whole model from 0.
    """
    for layer in chunk.decoder.layers:
        router = getattr(layer.mlp, "router", None)
        if router is not None:
            yield layer.layer_number - 1, router


def set_routing(chunk, routing: Routing, given: dict[int, torch.Tensor] | None) -> None:
    """Tell the routers of a model chunk whether to choose, record or replay in the next forward pass.

    given: {layer index: int64 [t, k]}, experts of this rank's tokens. Only Routing.given uses it.
    """
    for layer, router in routers(chunk):
        router.router_replay.given = given[layer] if routing == Routing.given else None
        router.router_replay.record = routing == Routing.record


def recorded_routing(chunk) -> dict[int, torch.Tensor]:
    """Return the experts that the last forward pass chose for each token, as {layer index: int64 [t, k]}.

    The pass must have run with Routing.record.
    """
    return {layer: router.router_replay.recorded for layer, router in routers(chunk)}


def take_loss_sums(chunks) -> dict[str, torch.Tensor]:
    """Return the sums of the routers' auxiliary losses since the last call, and set the sums to zero.

    The result is {"load_balancing_loss": sum, "z_loss": sum}, without losses that were not computed. A sum is
    over this rank's layers and micro-batches. The routers' recorded choices of experts are cleared too.

    chunks: model chunks of this rank.
    """
    sums: dict[str, torch.Tensor] = {}
    for chunk in chunks:
        for _, router in routers(chunk):
            for name, value in router.loss_sums.items():
                sums[name] = sums.get(name, 0) + value
            router.loss_sums = {}
            router.router_replay.clear()
    return sums
