"""Passes: forward and training passes of one rank over the micro-batches of its data-parallel replica."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from megatron.core import parallel_state as mpu

from grpo_megatron.algorithm.losses import TokenLoss
from grpo_megatron.algorithm.preferences import PreferenceLoss
from grpo_megatron.batch.arrays import Handle, values_of
from grpo_megatron.batch.token_stream import TokenStream
from grpo_megatron.cluster.memory import occupied
from grpo_megatron.config.schema import RoutingReplay
from grpo_megatron.megatron.forward_backward import (
    forward_backward,
    forward_scores,
    forward_values,
)
from grpo_megatron.megatron.head.objectives import make_head, make_objective
from grpo_megatron.megatron.layers.build import output_weight
from grpo_megatron.megatron.layers.rounding import rounding_noise
from grpo_megatron.megatron.layers.router import Routing, routers
from grpo_megatron.megatron.micro_batch import (
    MicroBatch,
    PreparedStore,
    choose_routing,
    rank_layout,
    set_trained,
)
from grpo_megatron.megatron.results import AdamOptions, StepOutcome, TrainResult
from grpo_megatron.megatron.reward_model import RewardModel
from grpo_megatron.megatron.step_metrics import beyond_limits, merge_over_context, router_metrics
from grpo_megatron.megatron.trained_model import TrainedModel
from grpo_megatron.metrics import Metrics, concrete, merge

MicroBatches = Sequence[TokenStream]


class Passes:
    """Runs forward passes and training steps over micro-batches on one rank. All ranks must call each method.

    A pass runs the trained model, the reference model (the trained model with the reference's weights), or a
    frozen reward model. The argument `micro_batches` has one token stream for each micro-batch of the rank's
    data-parallel replica.

    prepared: cache of the current step's micro-batches as prepared model inputs.
    """

    def __init__(self, model: TrainedModel, reward_model: RewardModel | None):
        self._model, self._reward_model = model, reward_model
        self._config, self._reports = model.config, model.rank.reports
        self._head = make_head(model.chunks, model.arch, model.config)
        self.prepared = PreparedStore(
            rank_layout(model.config, model.rank.cp_rank),
            model.device,
            own_attention=not model.transformer_engine,
        )

    @contextmanager
    def reference(self) -> Iterator[None]:
        """Have the reference's weights in the model within a `with` block. All ranks must enter it.

        Within it, only `logprobs(reference=True)` may be called, any number of times. Other passes, weight
        syncs and checkpoints raise RuntimeError, because they would take the reference's weights for the
        policy's.

        Raises RuntimeError if the run has no reference model, or if its weights are in the model already.
        """
        model, reference = self._model, self._model.require_reference()
        model.until_saved(weights_only=True)
        with model.settled_weights(), reference.in_place():
            model.has_reference = True
            try:
                yield
            finally:
                model.has_reference = False

    def logprobs(
        self,
        micro_batches: MicroBatches,
        reference: bool = False,
        key: tuple[int, int] | None = None,
        keep_hidden: bool = False,
        trained_only: bool = False,
    ) -> np.ndarray | None:
        """Return the log-prob of every target token, float32 [T], in the order of the micro-batches.

        All ranks must call this. Every rank of the last pipeline stage returns the log-probs of its replica's
        T tokens. The other ranks return None.

        reference: if True, compute the reference's log-probs. This needs a `with` block of `reference`.
        key: (step, index of the mini-batch). Later passes with the same key reuse the prepared inputs and,
            with moe.routing_replay, the choice of experts. None: prepare inputs for this pass only.
        keep_hidden: if True, store the last hidden states for the exact KL of `train_step`. Set it only with
            reference=True.
        trained_only: if True, compute only tokens whose loss counts, so that the output layer costs nothing
            for prompts and texts of environments. The other tokens get 0. The micro-batches must be
            TrainBatches.

        Raises RuntimeError if `reference` is True outside of such a block, or False within it.
        """
        model = self._model
        if reference and not model.has_reference:
            raise RuntimeError("logprobs(reference=True) is possible only within Passes.reference()")
        prepared = self.prepared.get(key, micro_batches)
        routing = Routing.own if reference else self._route(prepared, micro_batches, recording=True)
        device_limit = int(self._config.ref.hidden_gib * 2**30)

        def compute(hidden: torch.Tensor, micro_batch: MicroBatch) -> list[torch.Tensor]:
            if keep_hidden:
                self.prepared.keep_hidden(micro_batch, hidden[0], device_limit=device_limit)
            return [(self._head.of_trained if trained_only else self._head)(hidden, micro_batch).logp]

        if trained_only:
            for prepared_one, batch in zip(prepared, micro_batches, strict=True):
                set_trained(prepared_one, batch.loss_mask)
        with nullcontext() if reference else model.settled_weights():
            parts = forward_values(model.ddp, prepared, compute, routing)
        return torch.cat(parts, dim=1)[0].cpu().numpy() if model.rank.last_stage else None

    def scores(self, micro_batches: MicroBatches) -> np.ndarray | None:
        """Return the reward model's score of every sequence, float32 [S], in the order of the micro-batches.

        The run's frozen reward model computes the scores. If there is none, the trained model computes them,
        and must be a reward model.

        All ranks must call this. One rank of each data-parallel replica returns the scores of the replica's S
        sequences. The other ranks return None.
        """
        prepared = self.prepared.get(None, micro_batches)
        with self._model.settled_weights():
            of_trained_model = partial(forward_scores, self._model.ddp, head=self._head)
            parts = (self._reward_model or of_trained_model)(prepared)
        return torch.cat(parts).cpu().numpy() if self._reports else None

    def score_stored(self, handles: list[list[Handle]]) -> np.ndarray | None:
        """Fetch token sequences, and return the reward model's score of each sequence, float32 [S].

        All ranks must call this. One rank of each data-parallel replica returns the scores of the replica's S
        sequences, in the order of the handles. The other ranks return None.

        handles: for each micro-batch of this rank's replica, one handle per sequence. A handle refers to
            token ids that may be in another process or in a file.
        """
        ids = iter(values_of([handle for part in handles for handle in part]))
        return self.scores([TokenStream.of([next(ids) for _ in part]) for part in handles])

    def probe(
        self,
        micro_batches: MicroBatches,
        temperature: float,
        rounding: torch.dtype | None,
        reference: bool = False,
    ) -> np.ndarray | None:
        """Return log-prob and entropy of every target token, to compare them with a rollout engine's.

        All ranks must call this. One rank of each data-parallel replica returns float32 [2, T], with the
        log-probs of the replica's T tokens in row 0 and the entropies in row 1, in the order of the
        micro-batches. The other ranks return None.

        temperature: divisor of the logits, in place of the configured temperature.
        rounding: dtype whose rounding errors are simulated, by a random factor on each layer's output. None:
            no rounding errors.
        reference: if True, the values are those of the reference model.
        """
        model, head = self._model, replace(self._head, temperature=temperature)
        prepared = self.prepared.get(None, micro_batches)
        # No earlier pass recorded the experts of these sequences, but samples of the engine may have them.
        replays = (
            self._config.moe.routing_replay == RoutingReplay.engine and micro_batches[0].routing is not None
        )
        routing = self._route(prepared, micro_batches, recording=True) if replays else Routing.own
        weights = self.reference() if reference else model.settled_weights()
        with weights, rounding_noise(model.chunks, rounding) if rounding else nullcontext():
            parts = forward_values(
                model.ddp, prepared, lambda hidden, batch: head(hidden, batch)[:2], routing
            )
        return torch.cat(parts, dim=1).cpu().numpy() if self._reports else None

    def _route(self, prepared: list[MicroBatch], micro_batches: MicroBatches, recording: bool) -> Routing:
        replay, moe = self._config.moe.routing_replay, self._model.arch.moe
        layers = [layer for chunk in self._model.chunks for layer, _ in routers(chunk)]
        return choose_routing(replay, moe, layers, prepared, micro_batches, recording)

    def train_step(
        self,
        micro_batches: MicroBatches,
        loss: TokenLoss | PreferenceLoss,
        step_tokens: int,
        current_is_old: bool = False,
        key: tuple[int, int] | None = None,
        drop: bool = False,
    ) -> TrainResult | None:
        """Take one optimizer step on the weighted sum of all replicas' losses. All ranks must call this.

        The step is dropped, so that no weight changes, if a metric exceeds its limit in loss.limits, if the
        gradient norm is not finite, or if it is above optimizer.max_grad_norm_to_step.

        One rank of each data-parallel replica returns a TrainResult. The other ranks return None.

        step_tokens: number of tokens of the optimizer step over all replicas, padding excluded.
        current_is_old: if True, the current log-probs serve as the old policy's (train.old_logprobs=current).
        key: (step, index of the mini-batch). The inputs that an earlier pass prepared under this key are
            reused. None: prepare inputs for this pass only.
        drop: if True, compute loss and gradient norm, but drop the step.
        """
        metrics = self.compute_gradients(micro_batches, loss, step_tokens, current_is_old, key)
        beyond = beyond_limits(loss.limits, metrics)
        outcome = self.step(drop=drop or bool(beyond))
        if not self._reports:
            return None
        return TrainResult(outcome.grad_norm, outcome.lr, outcome.dropped, metrics, beyond, occupied())

    def step(self, drop: bool, adam: AdamOptions | None = None) -> StepOutcome:
        """Take one optimizer step on the gradients in `main_grad`, or drop it. All ranks must call this.

        adam: options of this step. None: those of the configuration.
        """
        model = self._model
        model.until_saved()
        with model.heartbeat.phase("optimizer"), model.memory.optimizer_at_hand():
            return model.optimizer.step(drop, adam)

    def compute_gradients(
        self,
        micro_batches: MicroBatches,
        loss: TokenLoss | PreferenceLoss,
        step_tokens: int,
        current_is_old: bool = False,
        key: tuple[int, int] | None = None,
    ) -> Metrics:
        """Compute the gradients of one optimizer step into each parameter's `main_grad`.

        All ranks must call this. One rank of each data-parallel replica returns the replica's metrics. The
        other ranks return an empty dict.

        step_tokens: number of tokens of the optimizer step over all replicas, padding excluded.
        current_is_old: if True, the current log-probs serve as the old policy's (train.old_logprobs=current).
        key: (step, index of the mini-batch). The inputs that an earlier pass prepared under this key are
            reused. None: prepare inputs for this pass only.
        """
        self.zero_gradients()
        return self.backward(micro_batches, loss, step_tokens, current_is_old, key)[0]

    def zero_gradients(self) -> None:
        """Set the gradients of all parameters to zero. Raises RuntimeError within `reference`."""
        self._model.require_policy()
        for ddp in self._model.ddp:
            ddp.zero_grad_buffer()
        self._model.optimizer.zero_grad()

    def backward(
        self,
        micro_batches: MicroBatches,
        loss: TokenLoss | PreferenceLoss,
        step_tokens: int,
        current_is_old: bool = False,
        key: tuple[int, int] | None = None,
        keep_logprobs: bool = False,
    ) -> tuple[Metrics, np.ndarray | None]:
        """Add the gradients of the loss to each parameter's `main_grad`. All ranks must call this.

        Returns (metrics, log-probs). The metrics are empty except on the rank that reports. The log-probs are
        float32 [T] on the last pipeline stage if keep_logprobs is True, else None.

        The other arguments are those of `compute_gradients`.
        """
        model = self._model
        model.require_policy()
        for ddp in model.ddp:
            ddp.train()
        prepared = self.prepared.get(key, micro_batches)
        head = self._head
        if loss.needs_full_kl and model.rank.last_stage:
            reference_weight = model.reference.value_of(output_weight(model.chunks[-1]))
            head = replace(head, reference_weight=lambda: reference_weight)
        routing = self._route(prepared, micro_batches, recording=False)
        objective = make_objective(head, loss, prepared, micro_batches, current_is_old, keep_logprobs)
        with model.heartbeat.phase("forward_backward"):
            parts = forward_backward(model.ddp, prepared, objective, step_tokens, routing)
        routers: Metrics = {}
        if model.arch.moe is not None:
            tokens = sum(stream.num_tokens for stream in micro_batches)
            routers = router_metrics(model.chunks, model.arch.moe, self._config.moe, tokens, model.device)
        *parts, routers = concrete([*parts, routers])
        metrics = merge_over_context(merge(parts)) if model.rank.last_stage else {}
        logp = None
        if keep_logprobs and model.rank.last_stage:
            group = mpu.get_context_parallel_group()
            found = [one.pack.gather(one.logp, group) for one in prepared]
            logp = torch.cat(found).cpu().numpy()
        return metrics | routers if self._reports else {}, logp
