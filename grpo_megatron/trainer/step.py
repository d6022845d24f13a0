"""The passes that a training step makes over its mini-batches."""

from dataclasses import replace

from grpo_megatron.algorithm.losses import PolicyLoss
from grpo_megatron.algorithm.mismatch import measure_mismatch
from grpo_megatron.batch.schedule import CostModel
from grpo_megatron.config.schema import Config, OldLogprobs
from grpo_megatron.metrics import Metrics, merge
from grpo_megatron.monitoring.phases import Phases
from grpo_megatron.trainer.mini_batch import MiniBatch
from grpo_megatron.trainer.policy import PolicyTrainer


class StepTrainer:
    """Runs the passes of each training step: computes old and reference log-probs, and takes optimizer steps.

    policy: the trainer, whose ranks compute the passes
    """

    def __init__(self, policy: PolicyTrainer, config: Config, phases: Phases):
        """Store the arguments.

        phases: timer that measures the passes under the names `logprobs`, `train` and `reference`.
        """
        self.policy, self._config, self._phases = policy, config, phases

    @property
    def cost_model(self) -> CostModel:
        """Estimate of a sequence's compute cost, used to divide sequences evenly among replicas."""
        return self.policy.cost_model

    def logprobs(self, mini_batches: list[MiniBatch], keep_hidden: bool = False) -> Metrics:
        """Set the log-probs of the old policy (batch.old_logp) and of the reference model (batch.ref_logp).

        train.old_logprobs decides whether old log-probs are recomputed, taken from the engine, or not set.
        Reference log-probs are computed only if the algorithm has a KL term.

        keep_hidden: if True, keep the reference model's last hidden states on the ranks. The training pass
            computes the exact KL from these states.

        Returns metrics of the mismatch, which is the difference between the log-probs of engine and trainer.
        If the old log-probs are not recomputed, the result is empty, and the first optimizer step measures
        the mismatch.
        """
        config, mismatch = self._config, []
        with self._phases("logprobs"):
            for mini in mini_batches:
                batch = mini.batch
                if config.train.old_logprobs == OldLogprobs.recompute:
                    batch.old_logp = self.policy.logprobs(batch, mini.plan, key=mini.key)
                    mismatch.append(measure_mismatch(batch))
                elif config.train.old_logprobs == OldLogprobs.rollout:
                    batch.old_logp = batch.rollout_logp
            if config.algorithm.needs_reference:
                with self.policy.reference():
                    for mini in mini_batches:
                        mini.batch.ref_logp = self.policy.logprobs(
                            mini.batch, mini.plan, reference=True, key=mini.key, keep_hidden=keep_hidden
                        )
        return merge(mismatch)

    def train(self, step: int, mini_batches: list[MiniBatch], loss: PolicyLoss) -> list[Metrics]:
        """Train on the mini-batches: one optimizer step per mini-batch in each of train.ppo_epochs epochs.

        Afterwards the policy's weights are copied into the reference weights if `step` is a multiple of
        ref.reset_every.

        step: index of the training step.
        Returns the metrics of each optimizer step, in order.
        """
        current = self._config.train.old_logprobs == OldLogprobs.current
        trained: list[Metrics] = []
        with self._phases("train"):
            for mini in mini_batches * self._config.train.ppo_epochs:
                trained.append(self.policy.train_step(mini.batch, mini.plan, loss, current, mini.key))
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
