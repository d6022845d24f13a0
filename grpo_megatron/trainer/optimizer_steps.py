"""Checks after every optimizer step, of the training loops and of a user's own loop (grpo_megatron.api)."""

import itertools
import math
from typing import NamedTuple

from grpo_megatron.config.schema import OptimizerConfig
from grpo_megatron.errors import UserError
from grpo_megatron.files import float_or_nan
from grpo_megatron.megatron.results import StepOutcome
from grpo_megatron.trainer.weights import TrainerWeights


class _Dropped(NamedTuple):
    """A dropped optimizer step, for the error message.

    grad_norm: gradient norm of the step.
    loss: loss of the step.
    beyond: reasons other than the gradient for which the step was dropped. Each is a clause for the message.
    """

    grad_norm: float
    loss: float
    beyond: tuple[str, ...] = ()


class OptimizerSteps:
    """Checks the outcome of each optimizer step, and counts the steps that are dropped in a row.

    An optimizer step is dropped, for example, if its gradient is not finite. It then changes no weight. A run
    that drops every step would only waste GPU time, so it is stopped (optimizer.max_dropped_steps).
    """

    def __init__(self, config: OptimizerConfig, weights: TrainerWeights):
        """Create the object. No step has been dropped.

        weights: the weights that the steps change.
        """
        self._config, self._weights = config, weights
        self._in_a_row: list[_Dropped] = []

    def state_dict(self) -> dict:
        return {"in_a_row": self._in_a_row}

    def load_state_dict(self, state: dict) -> None:
        self._in_a_row = [
            _Dropped(float_or_nan(norm), float_or_nan(loss), tuple(*beyond))
            for norm, loss, *beyond in state["in_a_row"]  # earlier versions did not save `beyond`
        ]

    def note(self, outcome: StepOutcome, loss: float, step: int, beyond: tuple[str, ...] = ()) -> None:
        """Record the outcome of one optimizer step. The driver calls this method after every optimizer step.

        A step that was not dropped resets the count, and becomes the `last_step` of the weights.

        loss: loss of this step.
        step: index of the training step, for error messages.
        beyond: reasons other than the gradient for which the step was dropped, such as a metric that exceeded
            its limit. Each is a clause for the error message.

        Raises UserError if gradient norm or loss is not finite because a weight is not finite, and when
        optimizer.max_dropped_steps steps in a row have been dropped.
        """
        if not (math.isfinite(outcome.grad_norm) and math.isfinite(loss)):
            self._weights.must_be_finite()
        if not outcome.dropped:
            self._weights.last_step = step
            self._in_a_row.clear()
            return
        self._in_a_row.append(_Dropped(outcome.grad_norm, loss, beyond))
        if len(self._in_a_row) < self._config.max_dropped_steps:
            return
        norms, losses, _ = zip(*self._in_a_row, strict=True)
        raise UserError(
            f"{len(self._in_a_row)} optimizer steps in a row were dropped, the last one in step {step} "
            f"(optimizer.max_dropped_steps={self._config.max_dropped_steps}); "
            f"gradient norms {_listed(norms)}, losses {_listed(losses)}. " + " ".join(self._reasons())
        )

    def _reasons(self) -> list[str]:
        """Return the reasons why the last steps in a row were dropped, as sentences for the error message."""
        reasons = []
        if not all(math.isfinite(step.grad_norm) for step in self._in_a_row):
            reasons.append(
                "A norm that is not finite comes from NaN or infinity in the weights, the log-probs or the "
                "advantages: look at actor/loss, actor/grad_norm and mismatch/max of earlier steps in "
                "metrics.jsonl; a lower optimizer.lr may help."
            )
        beyond = [step.beyond for step in self._in_a_row if step.beyond]
        if beyond:
            which = "" if len(beyond) == len(self._in_a_row) else f" for {len(beyond)} of these steps"
            each = dict.fromkeys(itertools.chain.from_iterable(beyond))
            reasons.append(f"The gradient was not the reason{which}. The reason was: {'; '.join(each)}.")
        if any(math.isfinite(step.grad_norm) and not step.beyond for step in self._in_a_row):
            limit = self._config.max_grad_norm_to_step
            reasons.append(
                f"A finite norm exceeded optimizer.max_grad_norm_to_step={limit}: either the limit is "
                "too low, or training diverges; compare actor/grad_norm of good steps in metrics.jsonl."
            )
        return reasons


def _listed(values: tuple[float, ...]) -> str:
    return ", ".join(f"{value:.4g}" for value in values)
