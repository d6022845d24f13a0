"""The passes that a training step makes over its mini-batches."""

from dataclasses import replace

from grpo_megatron.algorithm.coefficients import SequenceCoefficients
from grpo_megatron.algorithm.losses import PolicyLoss
from grpo_megatron.batch.schedule import CostModel
from grpo_megatron.batch.sums import SequenceSums
from grpo_megatron.config.schema import Config
from grpo_megatron.metrics import Metrics
from grpo_megatron.monitoring.phases import Phases
from grpo_megatron.trainer.mini_batch import MiniBatch
from grpo_megatron.trainer.policy import PolicyTrainer


class StepTrainer:
    """Runs the passes of each training step: computes old and reference log-probs, and takes optimizer steps.

    In each step, the caller calls `measure`, computes the coefficients of the loss from the result, and then
    calls `train` with the same mini-batches.

    policy: the trainer, whose ranks compute the passes
    """

    def __init__(self, policy: PolicyTrainer, config: Config, phases: Phases):
        """Create the object that runs the passes of training steps.

        policy: the trainer, whose ranks compute the passes.
        phases: timer that measures the passes under the names `logprobs`, `train` and `reference`.
        """
        self.policy, self._config, self._phases = policy, config, phases

    @property
    def cost_model(self) -> CostModel:
        """Estimate of a sequence's compute cost, used to divide sequences evenly among replicas."""
        return self.policy.cost_model

    def measure(self, mini_batches: list[MiniBatch]) -> tuple[list[SequenceSums], Metrics]:
        """Send the mini-batches to the ranks, which compute log-probs of the old policy and the reference.

        train.old_logprobs decides whether old log-probs are recomputed, taken from the engine, or not set.
        Reference log-probs are computed only if the algorithm has a KL term.

        Returns (sums, metrics): for each mini-batch the sums over the tokens of each of its sequences, and
        metrics of the mismatch, which is the difference between the log-probs of engine and trainer. If the
        old log-probs are not recomputed, there are no metrics, and the first optimizer step measures the
        mismatch.

        Raises UserError if a log-prob is NaN because a weight is not finite.
        """
        with self._phases("logprobs"):
            return self.policy.measure(mini_batches)

    def train(
        self,
        step: int,
        mini_batches: list[MiniBatch],
        coefficients: list[SequenceCoefficients],
        loss: PolicyLoss,
    ) -> list[Metrics]:
        """Train on the mini-batches: one optimizer step per mini-batch in each of train.ppo_epochs epochs.

        Afterwards the policy's weights are copied into the reference weights if `step` is a multiple of
        ref.reset_every.

        step: index of the training step.
        coefficients: advantages and weights of each mini-batch's sequences.
        loss: the loss. Its limit on the mismatch applies only to the first optimizer step.

        Returns the metrics of each optimizer step, in order. Raises the errors of
        PolicyTrainer.train_mini_batch.
        """
        trained: list[Metrics] = []
        with self._phases("train"):
            for mini, own in (
                list(zip(mini_batches, coefficients, strict=True)) * self._config.train.ppo_epochs
            ):
                trained.append(self.policy.train_mini_batch(mini, own, loss))
                # From the second optimizer step on, policy and engine are expected to differ.
                loss = replace(loss, mismatch_limit=None)
        every = self._config.ref.reset_every
        if every and step % every == 0:
            with self._phases("reference"):
                self.policy.reset_reference()
        return trained

    def state_dict(self) -> dict:
        return self.policy.state_dict()

    def load_state_dict(self, state: dict) -> None:
        self.policy.load_state_dict(state)
