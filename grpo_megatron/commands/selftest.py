"""`grpo-megatron selftest`: do engine and trainer agree on the probability of a token, and if not, why.

The run's own loop with learning rate 0: weights never move, so what engine and trainer disagree on must
stay as small in every step as rounding makes it. Engines start from random weights, so that all
they know came through the weight sync. A cause is named only if changing it, and nothing else, makes
the mismatch go away (or, for precision, makes one of that size).
"""

from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch

from grpo_megatron.commands.train import assembled_loop
from grpo_megatron.config.algorithm import MismatchAction, MismatchConfig
from grpo_megatron.config.engine import LoadFormat
from grpo_megatron.config.rollout import DynamicSamplingConfig, Strategy
from grpo_megatron.config.schema import CheckpointConfig, Config, EvalConfig, LrSchedule, OldLogprobs
from grpo_megatron.controller import Controller
from grpo_megatron.errors import UserError
from grpo_megatron.json_files import json_text
from grpo_megatron.rollout.manager import StaleWeights
from grpo_megatron.run.guard import Guard
from grpo_megatron.sglang.pool import EnginePool
from grpo_megatron.trainer.mini_batch import MiniBatch, make_mini_batches
from grpo_megatron.trainer.weight_probe import TRAINER_DTYPES, served_dtype, tolerance

# The mean |delta| of steps under the same weights may vary by this factor, by their samples.
FLAT = 4
# A change explains a mismatch if no more than this share of it is left.
LEFT = 1 / 3
# Standard errors by which surprise and entropy may differ, if samples are drawn from the whole distribution.
SAMPLING_Z = 6.0


@dataclass
class Verdict:
    """What a self-test found. explanations: one sentence for each cause, its name first.

    mean, maximum: |delta| of each step. limit: of the mean, from the trainer's own rounding. sampling_z:
    standard errors by which samples are less surprising (if negative) than the trainer's entropy.
    """

    mean: list[float] = field(default_factory=list)
    maximum: list[float] = field(default_factory=list)
    limit: float = float("nan")
    sampling_z: float = float("nan")
    explanations: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        return not self.explanations

    @property
    def beyond_limit(self) -> list[int]:
        """Steps, from 0, whose mean |delta| is beyond the limit, or NaN."""
        return [step for step, mean in enumerate(self.mean) if not mean <= self.limit]

    def text(self) -> str:
        lines = [f"{'step':>6} {'mean |delta|':>14} {'max |delta|':>14}"]
        lines += [
            f"{i + 1:>6} {m:>14.3g} {w:>14.3g}"
            for i, (m, w) in enumerate(zip(self.mean, self.maximum, strict=True))
        ]
        lines.append(f"limit of the mean, from the trainer's own rounding: {self.limit:.3g}")
        lines.append(
            f"surprise of the samples less the trainer's entropy: {self.sampling_z:+.1f} standard errors"
        )
        return "\n".join(lines + (self.explanations or ["engine and trainer agree"]))


def selftest_config(config: Config, steps: int) -> Config:
    """The run with learning rate 0 and nothing beside the loop. Raises UserError if it has no engines."""
    if config.rollout.replay:
        raise UserError(
            "selftest compares engine and trainer, but rollout.replay leaves no engine to compare with"
        )
    engine = replace(config.rollout.engine, load_format=LoadFormat.dummy)
    return replace(
        config,
        run=replace(config.run, name=f"{config.run.name}_selftest", total_steps=steps, resume="none"),
        data=replace(config.data, eval=None),
        # What a beam search finds is likelier than samples are, and would be taken for a fault.
        rollout=replace(
            config.rollout,
            engine=engine,
            record=None,
            dynamic_sampling=DynamicSamplingConfig(),
            strategy=Strategy.sampling,
        ),
        optimizer=replace(
            config.optimizer, lr=0.0, lr_min=0.0, lr_schedule=LrSchedule.constant, lr_warmup_steps=0
        ),
        # Every sample is looked at: a choice by outcome would bias what they say about the sampling.
        algorithm=replace(config.algorithm, filters=[]),
        mismatch=MismatchConfig(action=MismatchAction.off),
        train=replace(config.train, old_logprobs=OldLogprobs.recompute),
        eval=EvalConfig(),
        # A probe would end the run before the cause is found.
        weight_sync=replace(config.weight_sync, probe_every=0),
        checkpoint=CheckpointConfig(minutes=0, at_end=False, export_hf=False),
    )


class SelftestController(Controller):
    """The loop, keeping every step's samples with both log-probs."""

    def __init__(self, *args):
        super().__init__(*args)
        self.seen: list[list[MiniBatch]] = []

    def act_on_mismatch(self, mismatch, mini_batches: list[MiniBatch]) -> None:
        self.seen.append(mini_batches)
        super().act_on_mismatch(mismatch, mini_batches)


@dataclass(frozen=True)
class Tokens:
    """The trained tokens of some mini-batches, float64 [n]: log-probs of engine and trainer."""

    mini_batches: list[MiniBatch]
    engine: np.ndarray
    trainer: np.ndarray

    @classmethod
    def of(cls, mini_batches: list[MiniBatch]) -> "Tokens":
        engine, trainer = (
            np.concatenate([getattr(mini.batch, name)[mini.batch.loss_mask] for mini in mini_batches]).astype(
                np.float64
            )
            for name in ("rollout_logp", "old_logp")
        )
        return cls(mini_batches, engine, trainer)

    @property
    def mismatch(self) -> float:
        return float(np.abs(self.trainer - self.engine).mean())


class Investigation:
    """Changes one condition after the other, and looks at what is left of the mismatch."""

    def __init__(self, controller: SelftestController, engines: EnginePool):
        self.controller, self.engines, self.config = controller, engines, controller.config
        self.temperature = self.config.rollout.temperature
        self.dtype = TRAINER_DTYPES[self.config.megatron.precision]
        self.limit = 0.0

    def run(self) -> Verdict:
        verdict, steps = self.measured()
        self.limit = verdict.limit
        verdict.explanations = self.mismatch_explained(verdict, steps) + self.drift(verdict)
        # Samples can be held against the trainer's distribution where log-probs agree, or differ in a way that is known.
        if verdict.passed or verdict.explanations[0].startswith(("temperature", "precision")):
            verdict.sampling_z = self.surprise(steps)
            if abs(verdict.sampling_z) > SAMPLING_Z:
                verdict.explanations.append(self.sampling(verdict.sampling_z))
        return verdict

    def measured(self) -> tuple[Verdict, list[Tokens]]:
        """The numbers of each step, and its tokens."""
        steps = [Tokens.of(mini_batches) for mini_batches in self.controller.seen]
        verdict = Verdict(
            mean=[tokens.mismatch for tokens in steps],
            maximum=[float(np.abs(tokens.trainer - tokens.engine).max()) for tokens in steps],
            limit=tolerance(self.dtype) * self.rounding(steps[-1], self.dtype),
        )
        return verdict, steps

    def mismatch_explained(self, verdict: Verdict, steps: list[Tokens]) -> list[str]:
        """Why the mismatch is beyond the limit; nothing if it is not."""
        stale = self.weight_version(steps[-1])
        if stale:
            return [stale]
        bad = verdict.beyond_limit
        if not bad:
            return []
        if len(steps) - 1 in bad:
            return [self.explain(steps[-1])]
        return [
            f"weight version: the mismatch of step {bad[-1] + 1} is gone in the next, under the same weights; the engine got "
            "them too late"
        ]

    def drift(self, verdict: Verdict) -> list[str]:
        if len(verdict.beyond_limit) < len(verdict.mean) or max(verdict.mean) <= FLAT * min(verdict.mean):
            return []
        return [
            "drift: the mismatch changes from step to step although the learning rate is 0; the weight sync changes weights"
        ]

    # -- measurements -------------------------------------------------------------------------

    def probe(
        self, tokens: Tokens, temperature: float | None = None, rounding: torch.dtype | None = None
    ) -> np.ndarray:
        """float64 [2, n]: the trainer's log-probs and entropies."""
        temperature = self.temperature if temperature is None else temperature
        self.controller.ranks_turn()
        parts = [
            self.controller.trainer.probe(mini.batch, mini.plan, temperature, rounding)[
                :, mini.batch.loss_mask
            ]
            for mini in tokens.mini_batches
        ]
        return np.concatenate(parts, axis=1).astype(np.float64)

    def rounding(self, tokens: Tokens, dtype: torch.dtype) -> float:
        """Mean change of the trainer's log-probs by rounding errors of this dtype."""
        return float(np.abs(self.probe(tokens, rounding=dtype)[0] - tokens.trainer).mean())

    def scores(self, tokens: Tokens) -> tuple[np.ndarray, np.ndarray]:
        """Log-probs at temperature 1 of the ids that are trained on, float64 [n]: the trainer's, the engine's."""
        self.controller.engines_turn()
        scored = []
        for mini in tokens.mini_batches:
            batch = mini.batch
            pairs = zip(batch.cu_seqlens[:-1], batch.cu_seqlens[1:], strict=True)
            ids = [batch.tokens[start:end].tolist() for start, end in pairs]
            parts = self.engines.score(ids)
            scored.append(np.concatenate([np.append(part, 0.0) for part in parts])[batch.loss_mask])
        return self.probe(tokens, 1.0)[0], np.concatenate(scored)

    def sample_again(self) -> Tokens:
        """New samples and their log-probs under the same weights."""
        controller = self.controller
        controller.step += 1
        controller.engines_turn()
        groups = controller.rollouts.sample(controller.step, controller.prompts).groups
        controller.ranks_turn()
        mini_batches = make_mini_batches(groups, self.config, controller.trainer.cost_model, controller.step)
        controller.old_and_reference_logprobs(mini_batches)
        return Tokens.of(mini_batches)

    def surprise(self, steps: list[Tokens]) -> float:
        """Standard errors by which the mean of -log p exceeds the mean entropy, over the samples.

        Both have the same mean if each token is drawn from the trainer's distribution, whatever ends a
        response: their difference is a martingale's.
        """
        excess = np.concatenate([-tokens.engine - self.probe(tokens)[1] for tokens in steps])
        return float(excess.mean() / max(excess.std() / np.sqrt(len(excess)), 1e-12))

    # -- causes -------------------------------------------------------------------------------

    def explain(self, tokens: Tokens) -> str:
        enough = max(self.limit, LEFT * tokens.mismatch)
        left = self.sample_again().mismatch
        if left <= enough:
            return (
                f"weight version: mean |delta| was {tokens.mismatch:.3g} and is {left:.3g} after another weight sync; the engine "
                "generated with older weights than the trainer's"
            )
        for cause in (self.sampling_temperature, self.truncated, self.tokenizer, self.engine_precision):
            found = cause(tokens, enough)
            if found:
                return found
        return (
            f"unknown: mean |delta| is {tokens.mismatch:.3g} (limit {self.limit:.3g}), and neither a new weight sync nor another "
            "temperature, top-p, other token ids or the engine's precision explains it; some weights may not arrive as they "
            "are (the map of the architecture in grpo_megatron/model/families), or a layer computes something else. The "
            "worst tokens are in TensorBoard under mismatch/worst"
        )

    def weight_version(self, tokens: Tokens) -> str | None:
        """Double all weights and sync, then undo it (both are exact): does the engine follow the trainer?"""
        before = self.scores(tokens)
        self.controller.ranks_turn()
        try:
            self.controller.trainer.scale_weights(2.0)
            self.controller.sync_weights()
            after = self.scores(tokens)
        finally:
            self.controller.ranks_turn()
            self.controller.trainer.scale_weights(0.5)
        self.controller.sync_weights()
        trainer, engine = (float(np.abs(new - old).mean()) for new, old in zip(after, before, strict=True))
        # How far, not where to: with one tensor wrong the engine moves as much, but elsewhere.
        if engine > LEFT * trainer:
            return None
        return (
            f"weight version: other weights were synced, which moved the trainer's log-probs by {trainer:.3g} in the mean and the "
            f"engine's by {engine:.3g}; the engine generates with older weights than it was sent"
        )

    def sampling_temperature(self, tokens: Tokens, enough: float) -> str | None:
        def left(log_factor: float) -> float:
            logp = self.probe(tokens, self.temperature * float(np.exp(log_factor)))[0]
            return float(np.abs(logp - tokens.engine).mean())

        best, value = _minimum(left, np.log(np.geomspace(0.25, 4.0, 9)))
        if value > enough:
            return None
        self.temperature *= float(np.exp(best))
        return (
            f"temperature: mean |delta| is {tokens.mismatch:.3g} at rollout.temperature={self.config.rollout.temperature:g}, and "
            f"{value:.3g} at {self.temperature:.3g}; the engine samples, or reports its log-probs, at that temperature"
        )

    def truncated(self, tokens: Tokens, enough: float) -> str | None:
        # The mass of the nucleus divides every probability in it.
        if np.mean(tokens.trainer - tokens.engine > self.limit) > 1e-3:
            return None
        return (
            f"top-p: the engine's log-probs are above the trainer's, by {tokens.mismatch:.3g} in the mean, and never below; they "
            "are of a distribution cut to its likeliest tokens (top_p, top_k or min_p) and normalised again"
        )

    def tokenizer(self, tokens: Tokens, enough: float) -> str | None:
        """The engine scores the ids that the trainer saw: does it say now what the trainer says?"""
        trainer, engine = self.scores(tokens)
        left = float(np.abs(trainer - engine).mean())
        if left > enough:
            return None
        changed = np.abs(tokens.trainer - tokens.engine) > max(enough, 10 * left)
        return (
            f"tokenizer: given the ids that are trained on, the engine's log-probs differ by {left:.3g}; those it gave when it "
            f"sampled, by {tokens.mismatch:.3g} ({changed.mean():.1%} of the tokens). The ids were changed in between: text was "
            "tokenized again, or log-probs belong to other tokens"
        )

    def engine_precision(self, tokens: Tokens, enough: float) -> str | None:
        dtype, key = served_dtype(self.config)
        name = str(dtype).removeprefix("torch.")
        if torch.finfo(dtype).eps <= torch.finfo(self.dtype).eps:
            return None
        moved = self.rounding(tokens, dtype)
        if tokens.mismatch > tolerance(dtype) * moved:
            return None
        return (
            f"precision: the engine computes in {name} ({key}), the trainer in {str(self.dtype)[6:]}; rounding to "
            f"{name} moves the trainer's log-probs by {moved:.3g}, engine and trainer differ by {tokens.mismatch:.3g}"
        )

    def sampling(self, z: float) -> str:
        if z < 0:
            return (
                f"top-p: the log-probs agree, but the samples are likelier than the distribution makes them ({z:+.1f} standard "
                "errors of surprise less entropy); unlikely tokens are never drawn: the engine uses top_p, top_k or min_p"
            )
        return (
            f"sampling: the log-probs agree, but the samples are less likely than the distribution makes them ({z:+.1f} standard "
            "errors of surprise less entropy); tokens are drawn from a flatter distribution than the log-probs are of"
        )


def _minimum(function, grid: np.ndarray, rounds: int = 12) -> tuple[float, float]:
    """(place, value) of a function's minimum: the best of the grid's points, then golden-section search around it."""
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


def investigate(controller: SelftestController, engines: EnginePool) -> Verdict:
    """Run the loop and say what came out. Raises UserError for what has nothing to do with a mismatch."""
    try:
        controller.run()
        return Investigation(controller, engines).run()
    except StaleWeights as error:
        return Verdict(explanations=[f"weight version: {error}"])


def selftest(config: Config, steps: int = 3, guard: Guard | None = None) -> Verdict:
    """config: of a training run; steps: of the loop. Writes selftest.json into the run's folder."""
    with assembled_loop(selftest_config(config, steps), SelftestController, guard) as (controller, run):
        verdict = investigate(controller, run.engines)
        Path(f"{run.directory}/selftest.json").write_text(
            json_text(as_json(verdict), indent=2), encoding="utf-8"
        )
    return verdict


def as_json(verdict: Verdict) -> dict:
    """Return the verdict's fields, and whether it passed.

    What was not measured is NaN, which JSON has as null.
    """
    return {"passed": verdict.passed, **vars(verdict)}
