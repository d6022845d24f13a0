"""The self-test's search for the cause of a mismatch between engine and trainer.

delta is the difference between the log-probs that engine and trainer give a token, and the mismatch is the
mean |delta| over tokens. The search changes one condition after the other (another weight sync, another
temperature, other token ids, another precision), and measures each time how much of the mismatch is left.
"""

from dataclasses import dataclass

import numpy as np
import torch

from grpo_megatron.batch.train_batch import TrainBatch
from grpo_megatron.commands.selftest_verdict import Verdict
from grpo_megatron.controller import Controller
from grpo_megatron.sglang.pool import EnginePool
from grpo_megatron.trainer.mini_batch import MiniBatch, make_mini_batches
from grpo_megatron.trainer.policy import PolicyTrainer
from grpo_megatron.trainer.weight_probe import TRAINER_DTYPES, served_dtype, tolerance

# Factor by which the mean |delta| of steps with the same weights may vary, because their samples differ.
FLAT = 4
# A change explains a mismatch if at most this share of it is left.
LEFT = 1 / 3
# Standard errors by which surprise and entropy may differ if samples come from the whole distribution.
SAMPLING_Z = 6.0


@dataclass(frozen=True)
class Tokens:
    """Log-probs of engine and trainer for the n trained tokens of some mini-batches, to be compared.

    mini_batches: the mini-batches that contain the tokens
    batches: the samples of each mini-batch
    engine: log-probs that the engine reported when it sampled, float64 [n]
    trainer: log-probs that the trainer computed for the same tokens, float64 [n]
    """

    mini_batches: list[MiniBatch]
    batches: list[TrainBatch]
    engine: np.ndarray
    trainer: np.ndarray

    @classmethod
    def of(cls, mini_batches: list[MiniBatch], policy: PolicyTrainer) -> "Tokens":
        """Return the trained tokens of a training step. The trainer's log-probs are read from its ranks.

        mini_batches: all mini-batches of the newest step. The ranks have forgotten the log-probs of earlier
            steps.
        policy: the trainer.
        """
        batches = [TrainBatch.from_samples(mini.samples) for mini in mini_batches]
        masks = [batch.loss_mask for batch in batches]
        engine = [batch.rollout_logp[mask] for batch, mask in zip(batches, masks, strict=True)]
        trainer = [
            policy.read(mini, "old_logp")[0][mask] for mini, mask in zip(mini_batches, masks, strict=True)
        ]
        return cls(mini_batches, batches, *(np.concatenate(x).astype(np.float64) for x in (engine, trainer)))

    @property
    def mismatch(self) -> float:
        """Mean over the tokens of |trainer's log-prob - engine's log-prob|."""
        return float(np.abs(self.trainer - self.engine).mean())


class Investigation:
    """Search for the cause of a mismatch between the log-probs of engine and trainer, for the self-test.

    The search changes one condition at a time, such as the temperature, and measures how much of the mismatch
    is left.
    """

    def __init__(self, controller: Controller, engines: EnginePool, steps: list[Tokens]):
        """Prepare the search, after the training steps of the self-test.

        controller: the training loop that has made the steps.
        engines: the engines that generated the samples.
        steps: the trained tokens of each step.
        """
        self.controller, self.engines, self.config = controller, engines, controller.config
        self.handover, self.policy = controller.rollouts.handover, controller.trainer
        self.steps = steps
        self.temperature = self.config.rollout.temperature
        self.dtype = TRAINER_DTYPES[self.config.megatron.precision]
        self.limit = 0.0

    def run(self) -> Verdict:
        """Return the result of the self-test, with an explanation for each cause that was found."""
        verdict = self.measured()
        self.limit = verdict.limit
        verdict.explanations = self.mismatch_explained(verdict) + self._drift(verdict)
        # Samples can be compared with the trainer's distribution only if the log-probs agree, or differ in a
        # known way.
        if verdict.passed or verdict.explanations[0].startswith(("temperature", "precision")):
            verdict.sampling_z = self.surprise()
            if abs(verdict.sampling_z) > SAMPLING_Z:
                verdict.explanations.append(self._sampling(verdict.sampling_z))
        return verdict

    def measured(self) -> Verdict:
        """Return a Verdict with each step's mean and largest |delta| and the limit of the mean.

        delta is the difference between the log-probs of engine and trainer for a token. The Verdict has no
        explanations yet.
        """
        return Verdict(
            mean=[tokens.mismatch for tokens in self.steps],
            maximum=[float(np.abs(tokens.trainer - tokens.engine).max()) for tokens in self.steps],
            limit=tolerance(self.dtype) * self._rounding(self.steps[-1], self.dtype),
        )

    def mismatch_explained(self, verdict: Verdict) -> list[str]:
        """Find the cause of the mismatch between engine and trainer. Return one explanation, in a list.

        The list is empty if every step's mismatch is within verdict.limit and weight syncs reach the engine.
        The search syncs weights. It may also sample new tokens. If it finds that the engine uses another
        temperature, it sets `self.temperature` to that temperature.

        verdict: what `measured` returned: the mismatch of each step, and the limit.
        """
        stale = self._weight_version(self.steps[-1])
        if stale:
            return [stale]
        bad = verdict.beyond_limit
        if not bad:
            return []
        if len(self.steps) - 1 in bad:
            return [self._explain(self.steps[-1])]
        return [
            f"weight version: the mismatch of step {bad[-1] + 1} is gone in the next step, although the "
            "weights are the same; the engine received them too late"
        ]

    def _drift(self, verdict: Verdict) -> list[str]:
        if len(verdict.beyond_limit) < len(verdict.mean) or max(verdict.mean) <= FLAT * min(verdict.mean):
            return []
        return [
            "drift: the mismatch changes from step to step although the learning rate is 0, so the weight "
            "sync changes the weights"
        ]

    # -- measurements -------------------------------------------------------------------------

    def _probe(
        self, tokens: Tokens, temperature: float | None = None, rounding: torch.dtype | None = None
    ) -> np.ndarray:
        """Have the trainer compute log-probs and entropies of the tokens again, under changed conditions.

        temperature: sampling temperature; None: rollout.temperature, or the one that the search has found.
        rounding: dtype whose rounding errors the trainer adds to its computation; None: none are added.

        Returns float64 [2, n] for n tokens: row 0 has the log-probs, row 1 the entropies.
        """
        temperature = self.temperature if temperature is None else temperature
        self.handover.to_ranks()
        parts = []
        for mini, batch in zip(tokens.mini_batches, tokens.batches, strict=True):
            found = self.policy.probe(mini.plan, mini.stream, temperature, rounding)
            parts.append(np.concatenate(found)[batch.loss_mask])
        return np.concatenate(parts).astype(np.float64).T

    def _rounding(self, tokens: Tokens, dtype: torch.dtype) -> float:
        """Return the mean |change| of the trainer's log-probs when rounding errors of this dtype are added.

        The largest acceptable mismatch is a multiple of this mean.
        """
        return float(np.abs(self._probe(tokens, rounding=dtype)[0] - tokens.trainer).mean())

    def _scores(self, tokens: Tokens) -> tuple[np.ndarray, np.ndarray]:
        """Have trainer and engine score the same token ids at temperature 1, without sampling.

        Returns (trainer's log-probs, engine's log-probs) of the trained tokens, float64 [n] each.
        """
        self.handover.to_engines()
        scored = []
        for batch in tokens.batches:
            pairs = zip(batch.cu_seqlens[:-1], batch.cu_seqlens[1:], strict=True)
            ids = [batch.tokens[start:end].tolist() for start, end in pairs]
            parts = self.engines.score_on_all(ids)[0]
            scored.append(np.concatenate([np.append(part, 0.0) for part in parts])[batch.loss_mask])
        return self._probe(tokens, 1.0)[0], np.concatenate(scored)

    def _sample_again(self) -> Tokens:
        """Sample new tokens with the same weights, and return them with the log-probs of engine and trainer.

        Call this after another weight sync. If the mismatch of the new tokens is small, the engine must have
        sampled the earlier tokens with old weights.
        """
        controller, step = self.controller, self.controller.loop.begin_step()
        groups = controller.rollouts.take(step).groups
        mini_batches = make_mini_batches(groups, self.config, self.policy.cost_model, step)
        self.policy.measure(mini_batches)
        return Tokens.of(mini_batches, self.policy)

    def surprise(self) -> float:
        """Test whether the engine draws tokens from the distribution that its log-probs describe.

        Returns mean surprise (-log p of the engine) minus mean entropy (of the trainer), in standard errors.
        If tokens are drawn from the trainer's distribution, the two means differ only by chance.
        """
        excess = np.concatenate([-tokens.engine - self._probe(tokens)[1] for tokens in self.steps])
        return float(excess.mean() / max(excess.std() / np.sqrt(len(excess)), 1e-12))

    # -- causes -------------------------------------------------------------------------------

    def _explain(self, tokens: Tokens) -> str:
        acceptable = max(self.limit, LEFT * tokens.mismatch)
        left = self._sample_again().mismatch
        if left <= acceptable:
            return (
                f"weight version: mean |delta| was {tokens.mismatch:.3g} and is {left:.3g} after another "
                "weight sync; the engine generated with older weights than the trainer's"
            )
        for cause in (self._sampling_temperature, self._truncated, self._tokenizer, self._engine_precision):
            found = cause(tokens, acceptable)
            if found:
                return found
        return (
            f"unknown: mean |delta| is {tokens.mismatch:.3g} (limit {self.limit:.3g}), and neither weight "
            "version, temperature, top-p, token ids nor the engine's precision explains it; check the weight "
            "map of the architecture in grpo_megatron/model/families, and the layers of both sides. The "
            "worst tokens are in TensorBoard under mismatch/worst"
        )

    def _weight_version(self, tokens: Tokens) -> str | None:
        """Check that weight syncs reach the engine: double all weights and sync, then halve them and sync.

        Both changes are exact in floating point. Returns an explanation if the engine's log-probs change much
        less than the trainer's, else None.
        """
        before = self._scores(tokens)
        self.handover.to_ranks()
        try:
            self.policy.weights.scale(2.0)
            self.handover.publish()
            after = self._scores(tokens)
        finally:
            self.handover.to_ranks()
            self.policy.weights.scale(0.5)
        self.handover.publish()
        trainer, engine = (float(np.abs(new - old).mean()) for new, old in zip(after, before, strict=True))
        # Compare only the sizes of the changes. With one wrong tensor, the engine's log-probs change as much,
        # but differently.
        if engine > LEFT * trainer:
            return None
        return (
            "weight version: a sync of different weights moved the trainer's log-probs by "
            f"{trainer:.3g} on average and the engine's by {engine:.3g}; the engine generates with older "
            "weights than it was sent"
        )

    def _sampling_temperature(self, tokens: Tokens, acceptable: float) -> str | None:
        def left(log_factor: float) -> float:
            logp = self._probe(tokens, self.temperature * float(np.exp(log_factor)))[0]
            return float(np.abs(logp - tokens.engine).mean())

        best, value = _minimum(left, np.log(np.geomspace(0.25, 4.0, 9)))
        if value > acceptable:
            return None
        self.temperature *= float(np.exp(best))
        return (
            f"temperature: mean |delta| is {tokens.mismatch:.3g} at "
            f"rollout.temperature={self.config.rollout.temperature:g}, and {value:.3g} at "
            f"{self.temperature:.3g}; the engine samples, or reports its log-probs, at that temperature"
        )

    def _truncated(self, tokens: Tokens, acceptable: float) -> str | None:
        # top-p divides every probability in the nucleus by the mass of the nucleus, so none gets smaller.
        if np.mean(tokens.trainer - tokens.engine > self.limit) > 1e-3:
            return None
        return (
            f"top-p: the engine's log-probs are above the trainer's by {tokens.mismatch:.3g} on average, and "
            "never below; they belong to a distribution that was cut to its likeliest tokens (top_p, top_k "
            "or min_p) and normalised again"
        )

    def _tokenizer(self, tokens: Tokens, acceptable: float) -> str | None:
        """Test whether token ids changed between sampling and training, for example by tokenizing text again.

        The engine scores the ids that the trainer trained on. If the log-probs of engine and trainer then
        agree, the ids have changed, and an explanation is returned. Otherwise, the result is None.

        acceptable: mean |log-prob of engine - log-prob of trainer| at or below which the log-probs agree.
        """
        trainer, engine = self._scores(tokens)
        left = float(np.abs(trainer - engine).mean())
        if left > acceptable:
            return None
        changed = np.abs(tokens.trainer - tokens.engine) > max(acceptable, 10 * left)
        return (
            "tokenizer: when the engine scores the ids that are trained on, its log-probs differ from the "
            f"trainer's by {left:.3g}; when it sampled, they differed by {tokens.mismatch:.3g} (at "
            f"{changed.mean():.1%} of the tokens). The ids changed in between: text was tokenized again, or "
            "log-probs belong to different tokens"
        )

    def _engine_precision(self, tokens: Tokens, acceptable: float) -> str | None:
        dtype, key = served_dtype(self.config)
        name = str(dtype).removeprefix("torch.")
        if torch.finfo(dtype).eps <= torch.finfo(self.dtype).eps:
            return None
        moved = self._rounding(tokens, dtype)
        if tokens.mismatch > tolerance(dtype) * moved:
            return None
        return (
            f"precision: the engine computes in {name} ({key}), the trainer in {str(self.dtype)[6:]}. "
            f"Rounding to {name} changes the trainer's log-probs by {moved:.3g}, which explains that engine "
            f"and trainer differ by {tokens.mismatch:.3g}"
        )

    def _sampling(self, z: float) -> str:
        if z < 0:
            return (
                "top-p: the log-probs agree, but the samples are likelier than the distribution makes them "
                f"(their mean -log p is {-z:.1f} standard errors below the entropy); unlikely tokens are "
                "never drawn: the engine uses top_p, top_k or min_p"
            )
        return (
            "sampling: the log-probs agree, but the samples are less likely than the distribution makes "
            f"them (their mean -log p is {z:.1f} standard errors above the entropy); tokens are drawn from a "
            "flatter distribution than that of the log-probs"
        )


def _minimum(function, grid: np.ndarray, rounds: int = 12) -> tuple[float, float]:
    """Return (x, function(x)) at the minimum of a function of one number.

    The function is computed at all values in `grid`. A golden-section search then continues between the two
    neighbours of the best value.

    grid: sorted values of x.
    rounds: number of steps of the golden-section search.
    """
    values = [function(x) for x in grid]
    best = int(np.argmin(values))
    low, high = grid[max(best - 1, 0)], grid[min(best + 1, len(grid) - 1)]
    golden = (np.sqrt(5) - 1) / 2
    a, b = high - golden * (high - low), low + golden * (high - low)
    at_a, at_b = function(a), function(b)
    for _ in range(rounds):
        if at_a < at_b:
            high, b, at_b = b, a, at_a
            a = high - golden * (high - low)
            at_a = function(a)
        else:
            low, a, at_a = a, b, at_b
            b = low + golden * (high - low)
            at_b = function(b)
    return min([(a, at_a), (b, at_b), (grid[best], values[best])], key=lambda pair: pair[1])
