"""Datum: a sequence that a user's own loop trains on, and the batch of several of them."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from grpo_megatron.batch.sample import Sample
from grpo_megatron.batch.train_batch import TrainBatch
from grpo_megatron.errors import UserError

# {field of Datum: column of TrainBatch}
_COLUMNS = {"weight": "weight", "advantage": "advantage", "logprobs": "old_logp", "reference": "ref_logp"}


@dataclass(frozen=True)
class Datum:
    """A sequence of n > 1 tokens to train on.

    Each array has a value for each token, [n]. The first token's values have no effect, because nothing
    predicts this token.
    """

    tokens: np.ndarray
    """int [n]. Token ids of the prompt and the response."""
    weight: np.ndarray
    """float32 [n]. Weight of each token's loss. 0: the token is not trained on."""
    advantage: np.ndarray | None = None
    """float32 [n]. Advantage of each token. None: 0, which suits losses without advantages."""
    logprobs: np.ndarray | None = None
    """float32 [n]. Log-prob of each token when it was sampled. None: the current one, so that the ratio of
    the policies is 1."""
    reference: np.ndarray | None = None
    """float32 [n]. Log-prob of each token under the reference model, for a loss with a KL term."""

    def __post_init__(self):
        if len(self.tokens) < 2:
            raise UserError(f"a Datum needs at least two tokens, but has {len(self.tokens)}")
        for name in _COLUMNS:
            values = getattr(self, name)
            if values is not None and np.shape(values) != (len(self.tokens),):
                raise UserError(
                    f"Datum.{name} must have a value for each of the {len(self.tokens)} tokens, but has the "
                    f"shape {np.shape(values)}"
                )
            if values is not None and not np.isfinite(values).all():
                raise UserError(f"Datum.{name} must be finite, but has a value that is NaN or infinite")

    @classmethod
    def of(cls, sample: Sample, advantage: float, weight: float = 1.0) -> "Datum":
        """Return a sample as a Datum, with the log-probs with which its tokens were sampled.

        advantage: advantage of each token that the model wrote.
        weight: weight of each such token in the loss. With 1, the loss is a sum over tokens.
        """
        arrays = sample.arrays
        before = np.zeros(len(arrays.prompt_ids), np.float32)
        trained = np.concatenate([before, arrays.loss_mask]).astype(np.float32)
        return cls(
            tokens=np.concatenate([arrays.prompt_ids, arrays.response_ids]),
            weight=weight * trained,
            advantage=advantage * trained,
            logprobs=np.concatenate([before, arrays.rollout_logprobs]),
        )

    def without_weight(self) -> "Datum":
        """Return a copy in which all weights are 0, so that it adds nothing to the gradient."""
        return Datum(self.tokens, np.zeros(len(self.tokens), np.float32), logprobs=self.logprobs)


def datum_batch(data: Sequence[Datum]) -> TrainBatch:
    """Return the stream of some sequences. Values stand at the position that predicts their token."""
    columns = {
        name: np.concatenate([_predicted(one, field) for one in data]) for field, name in _COLUMNS.items()
    }
    numbers = np.arange(len(data))
    return TrainBatch.of(
        [np.asarray(one.tokens) for one in data],
        group_id=numbers,
        trajectory_id=numbers,
        reward=np.zeros(len(data), np.float32),
        loss_mask=columns["weight"] != 0,
        rollout_logp=columns["old_logp"],
        **columns,
    )


def _predicted(datum: Datum, field: str) -> np.ndarray:
    """Return a field of a Datum, float32 [n], with each value one position earlier, and 0 at the end."""
    values = getattr(datum, field)
    if values is None:
        return np.zeros(len(datum.tokens), np.float32)
    return np.append(values[1:], 0).astype(np.float32)


def at_tokens(predicted: np.ndarray) -> np.ndarray:
    """Return values at the positions that predict the tokens, moved to the tokens, float32 [n]."""
    return np.append(np.float32(0), predicted[:-1]).astype(np.float32)
