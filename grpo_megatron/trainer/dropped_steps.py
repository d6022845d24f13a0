"""Limit on the optimizer steps that may be dropped in a row."""

import math

from grpo_megatron.config.schema import OptimizerConfig
from grpo_megatron.errors import UserError


class DroppedSteps:
    """Counts optimizer steps that are dropped in a row, and stops the run if there are too many.

    A dropped optimizer step changes no weight, for example because its gradient is not finite. A run that
    drops every step would only waste GPU time.
    """

    def __init__(self, config: OptimizerConfig):
        self._config = config
        self._in_a_row: list[tuple[float, float]] = []
        self._beyond: tuple[str, ...] = ()

    def state_dict(self) -> dict:
        return {"in_a_row": self._in_a_row}

    def load_state_dict(self, state: dict) -> None:
        self._in_a_row = [tuple(pair) for pair in state["in_a_row"]]

    def note(
        self, dropped: bool, grad_norm: float, loss: float, step: int | None, beyond: tuple[str, ...] = ()
    ) -> None:
        """Record the outcome of one optimizer step. The driver calls this method after every optimizer step.

        dropped: True if the step was dropped.
        grad_norm, loss: gradient norm and loss of this step, for the error message.
        step: index of the training step, for the error message. None: unknown.
        beyond: reasons other than the gradient for which the step was dropped, such as a limit of the loss
            that was exceeded. Each is a clause for the error message.
        Raises UserError when optimizer.max_dropped_steps steps in a row have been dropped.
        """
        if not dropped:
            self._in_a_row.clear()
            self._beyond = ()
            return
        self._in_a_row.append((grad_norm, loss))
        self._beyond = beyond or self._beyond
        if len(self._in_a_row) < self._config.max_dropped_steps:
            return
        norms, losses = (
            ", ".join(f"{value:.4g}" for value in values) for values in zip(*self._in_a_row, strict=True)
        )
        reasons = []
        if not all(math.isfinite(norm) for norm, _ in self._in_a_row):
            reasons.append(
                "A norm that is not finite comes from NaN or infinity in the weights, the log-probs or the "
                "advantages: look at actor/loss, actor/grad_norm and mismatch/max of earlier steps in "
                "metrics.jsonl; a lower optimizer.lr may help."
            )
        if self._beyond:
            reasons.append(f"The gradient was not the reason. The reason was: {self._beyond[0]}.")
        elif any(math.isfinite(norm) for norm, _ in self._in_a_row):
            limit = self._config.max_grad_norm_to_step
            reasons.append(
                f"A finite norm exceeded optimizer.max_grad_norm_to_step={limit}: either the limit is "
                "too low, or training diverges; compare actor/grad_norm of good steps in metrics.jsonl."
            )
        raise UserError(
            f"{len(self._in_a_row)} optimizer steps in a row were dropped"
            + ("" if step is None else f", the last one in step {step}")
            + f" (optimizer.max_dropped_steps={self._config.max_dropped_steps}); "
            f"gradient norms {norms}, losses {losses}. " + " ".join(reasons)
        )
