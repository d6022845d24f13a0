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
    """Makes the passes of each training step: old and reference log-probs, and optimizer steps.

    policy: all trainer ranks, which do the work
    """

    def __init__(self, policy: PolicyTrainer, config: Config, phases: Phases):
        """Prepare the passes. phases: measures their time, as `logprobs`, `train` and `reference`."""
        self.policy, self._config, self._phases = policy, config, phases

    @property
    def cost_model(self) -> CostModel:
        """Estimate of a sequence's compute time, by which replicas get equal shares."""
        return self.policy.cost_model

    def logprobs(self, mini_batches: list[MiniBatch], keep_hidden: bool = False) -> Metrics:
        """Set each batch's log-probs of the old policy (old_logp) and of the reference model (ref_logp).

        keep_hidden: keep the reference's last hidden states on the ranks, for the exact KL in training.

        Returns metrics of the mismatch between engine and trainer if the old log-probs were recomputed;
        otherwise empty, because the first optimizer step measures it.
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
        """Make one optimizer step per mini-batch in each of train.ppo_epochs epochs.

        Afterwards, the current weights become the reference if ref.reset_every asks for it after this step.

        Returns the metrics of each optimizer step, in order.
        """
        current = self._config.train.old_logprobs == OldLogprobs.current
        trained: list[Metrics] = []
        with self._phases("train"):
            for mini in mini_batches * self._config.train.ppo_epochs:
                trained.append(self.policy.train_step(mini.batch, mini.plan, loss, current, mini.key))
                # after the first step, policy and engine are expected to differ
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
