"""The configured RL algorithm of a run, with the few values that change from step to step."""

from dataclasses import replace
from math import isnan

from grpo_megatron.algorithm.coefficients import SequenceCoefficients, step_coefficients
from grpo_megatron.algorithm.kl import KLController
from grpo_megatron.algorithm.losses import PolicyLoss
from grpo_megatron.algorithm.mismatch import Decode, MismatchReport, ids_as_text, mismatch_report
from grpo_megatron.batch.sums import SequenceSums
from grpo_megatron.batch.table import SampleTable
from grpo_megatron.config.schema import Config, OldLogprobs
from grpo_megatron.metrics import Metrics


class Algorithm:
    """The configured RL algorithm: computes advantages and weights of the sequences, and provides the loss.

    The object keeps two values that change from step to step: the coefficient of the KL in the reward, and
    the policy's entropy in the last step.

    decode: function from token ids to text, to show tokens to the user
    """

    def __init__(self, config: Config, decode: Decode | None = None):
        """Prepare the algorithm for the first step. `load_state_dict` continues from a checkpoint.

        decode: converts token ids to text, to show trajectories, and the tokens that engine and trainer
            disagree about most. If None, token ids are shown.
        """
        recomputed = config.train.old_logprobs == OldLogprobs.recompute
        self._config, self.decode = config, decode or ids_as_text
        self._loss = PolicyLoss.from_config(config.algorithm, config.mismatch, known_before=recomputed)
        self._kl_controller = KLController.from_config(config.algorithm.kl_ctrl)
        self._entropy: float | None = None  # mean over the last step's trained tokens

    @property
    def loss(self) -> PolicyLoss:
        """The loss function of the next training step.

        With algorithm.entropy_floor, the loss has an entropy bonus only if the policy's entropy in the last
        step was below this floor, so the first step has none. Without this setting, every step has the
        configured bonus.
        """
        floor = self._config.algorithm.entropy_floor
        enough = floor is not None and (self._entropy is None or self._entropy >= floor)
        if not enough:
            return self._loss
        return replace(self._loss, algorithm=replace(self._loss.algorithm, entropy_coeff=0.0))

    def mismatch_report(self, mismatch: Metrics) -> MismatchReport:
        """Return the report on a step's mismatch: the message to the user, and whether the run must stop.

        The mismatch is the difference between the engine's and the trainer's log-probs of the same tokens.

        mismatch: merged `mismatch_metrics` of the step, after `in_context` (both in algorithm/mismatch.py).
        """
        return mismatch_report(mismatch, self._config.mismatch, self.decode)

    def coefficients(
        self, tables: list[SampleTable], sums: list[SequenceSums]
    ) -> tuple[list[SequenceCoefficients], Metrics]:
        """Return (coefficients of each mini-batch of a step, metrics about them).

        The coefficients are the advantages and weights of the sequences. With algorithm.use_kl_in_reward, the
        coefficient of the KL is also updated for the next step.

        tables, sums: the sequences of each mini-batch, and the sums over their tokens.
        """
        return step_coefficients(tables, sums, self._config, self._kl_controller)

    def note_trained(self, metrics: Metrics) -> None:
        """Store the policy's mean entropy in a finished training step.

        The stored entropy decides whether the next step's loss has an entropy bonus. If the step trained on
        no token, the earlier entropy is kept.

        metrics: the merged metrics of all optimizer steps of the training step.
        """
        entropy = metrics["actor/entropy"].result()
        self._entropy = self._entropy if isnan(entropy) else entropy

    def state_dict(self) -> dict:
        return {"kl_controller": self._kl_controller.state_dict(), "entropy": self._entropy}

    def load_state_dict(self, state: dict) -> None:
        self._kl_controller.load_state_dict(state["kl_controller"])
        self._entropy = state["entropy"]
