"""The loss of a reward model on preference pairs, as pure tensor functions like those in losses.py.

The loss couples the two sequences of a pair, so both are in the same micro-batch. Pair i consists of sequence
2i, the chosen one, and sequence 2i + 1, the rejected one.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from grpo_megatron.metrics import Mean, Metrics, Std


@dataclass(frozen=True)
class PairInputs:
    """Weights and margins of the P preference pairs of a micro-batch."""

    weight: torch.Tensor
    """float32 [P]. Weight of each pair's loss in the sum over the optimizer step."""
    margin: torch.Tensor
    """float32 [P]. How much the score of the chosen sequence should exceed that of the rejected one."""


@dataclass(frozen=True)
class PreferenceLoss:
    """Bradley-Terry loss of a reward model: -log sigmoid(chosen - rejected - margin) for each pair.

    chosen and rejected are the scores of a pair's two sequences (Ouyang et al. 2022, arXiv:2203.02155 eq. 1).
    The margin (Touvron et al. 2023, arXiv:2307.09288 eq. 2) may be 0.
    """

    needs_full_kl = False

    @property
    def limits(self) -> dict[str, float]:
        return {}

    def __call__(self, scores: torch.Tensor, inputs: PairInputs) -> tuple[torch.Tensor, Metrics]:
        """Return (loss, metrics) of P pairs. The loss is float32 [P], one unweighted value per pair.

        scores: float32 [2P]. scores[2i] and scores[2i + 1] are the scores of the chosen and of the rejected
            sequence of pair i.
        """
        chosen, rejected = scores.view(-1, 2).unbind(1)
        ahead = chosen - rejected
        loss = -F.logsigmoid(ahead - inputs.margin)
        count = len(ahead)
        return loss, {
            "reward_model/loss": Mean(loss.detach().sum(), count),
            "reward_model/accuracy": Mean((ahead > 0).sum(), count),
            "reward_model/margin": Mean(ahead.detach().sum(), count),
            "reward_model/score_mean": Mean(scores.detach().sum(), 2 * count),
            "reward_model/score_std": Std.of(scores),
        }
