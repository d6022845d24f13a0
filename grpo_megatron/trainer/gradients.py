"""TrainerGradients: gradients that the ranks add up over several calls, and the optimizer step on them."""

from collections.abc import Callable, Sequence

import numpy as np

from grpo_megatron.algorithm.losses import TokenLoss
from grpo_megatron.batch.schedule import Schedule
from grpo_megatron.batch.train_batch import TrainBatch
from grpo_megatron.errors import UserError
from grpo_megatron.megatron.results import AdamOptions, StepOutcome
from grpo_megatron.metrics import Mean, Metrics, merge
from grpo_megatron.trainer.optimizer_steps import OptimizerSteps
from grpo_megatron.trainer.ranks import RankGroup


class TrainerGradients:
    """Handle on the gradients that the ranks add up over several calls, for a user's own training loop."""

    def __init__(self, ranks: RankGroup, steps: OptimizerSteps):
        """Create the handle. There are no gradients until `add` is called.

        steps: checks the outcome of each optimizer step.
        """
        self._ranks, self._steps = ranks, steps
        self._calls, self._loss, self._trains = 0, 0.0, False

    @property
    def calls(self) -> int:
        """Number of calls of `add` since the last optimizer step."""
        return self._calls

    def add(
        self,
        plan: Schedule,
        make: Callable[[Sequence[int]], TrainBatch],
        loss: TokenLoss,
        current_is_old: bool,
    ) -> tuple[list[np.ndarray], Metrics]:
        """Add the gradient of the weighted loss, summed over all sequences, to the gradients on the ranks.

        Returns (log-probs, metrics). The log-probs are an array float32 [n] for each sequence of n tokens, in
        the order of the sequences. Row i is of token i + 1; tokens that are not trained have 0.

        plan: division of the sequences among data-parallel replicas and micro-batches.
        make: function that returns the stream of a micro-batch. Its argument is the indices of the
            micro-batch's sequences.
        loss: the loss of each token.
        current_is_old: if True, the current log-probs serve as the old policy's, so that the ratio is 1.
        """
        streams = plan.divided(make)
        every = [stream for own in streams for stream in own]
        num_tokens = sum(stream.num_tokens for stream in every)
        results = self._ranks.call(
            "gradients.add", [(own, loss, num_tokens, current_is_old) for own in streams]
        )
        metrics = merge([of_replica for of_replica, _ in results])
        # This is a sum over micro-batches and ranks.
        total = metrics["actor/loss"].value
        metrics["actor/loss"] = Mean(total, 1)
        self._calls += 1
        self._loss += float(total)
        self._trains |= any(stream.weight.any() for stream in every)
        lengths = np.concatenate([stream.lengths for stream in every])[plan.order]
        return plan.by_sequence([logp for _, logp in results], lengths), metrics

    def discard(self) -> None:
        """Discard the gradients of all calls of `add` since the last optimizer step."""
        if self._calls:
            self._ranks.call_alike("gradients.discard")
        self._calls, self._loss, self._trains = 0, 0.0, False

    def step(self, adam: AdamOptions, step: int) -> StepOutcome:
        """Take one optimizer step on the gradients, and discard them.

        The step is dropped if no token had a weight, because Adam would still move the weights. It is also
        dropped if the gradient norm is not finite or above optimizer.max_grad_norm_to_step.

        step: index of the step, for error messages.

        Raises UserError if there are no gradients, and the errors of OptimizerSteps.note.
        """
        if not self._calls:
            raise UserError("optim_step needs gradients: call forward_backward before")
        calls = [(adam, not self._trains)] * self._ranks.replicas
        outcome: StepOutcome = self._ranks.call("gradients.step", calls)[0]
        loss, untrained = self._loss, () if self._trains else ("no token has a weight in the loss",)
        self._calls, self._loss, self._trains = 0, 0.0, False
        self._steps.note(outcome, loss, step, untrained)
        return outcome
