"""Examples: prompts with a given response, from a data file, and the token stream of supervised training."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from grpo_megatron.batch.token_stream import TokenStream


@dataclass(frozen=True)
class Example:
    """A prompt of P tokens with a given response of R > 0 tokens.

    prompt_ids: int32 [P]
    response_ids: int32 [R]
    loss_mask: bool [R], True for tokens that are trained on. None: all of them.
    """

    prompt_ids: np.ndarray
    response_ids: np.ndarray
    loss_mask: np.ndarray | None = None

    @property
    def ids(self) -> np.ndarray:
        return np.concatenate([self.prompt_ids, self.response_ids])

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_ids) + len(self.response_ids)

    @property
    def num_trained(self) -> int:
        """Number of response tokens that are trained on."""
        return len(self.response_ids) if self.loss_mask is None else int(np.count_nonzero(self.loss_mask))


@dataclass(kw_only=True)
class ExampleBatch(TokenStream):
    """A token stream for supervised training: tokens, and the weight of each token's loss."""

    weight: np.ndarray
    """float32 [T]. Weight of the loss of the token that each position predicts; 0: it is not trained on."""

    @classmethod
    def of_examples(cls, examples: Sequence[Example], weight: float) -> "ExampleBatch":
        """Return the stream of some examples, one sequence per example.

        weight: weight of the loss of each trained token.
        """
        weights = np.zeros(sum(example.num_tokens for example in examples), dtype=np.float32)
        end = 0
        for example in examples:
            end += example.num_tokens
            trained = True if example.loss_mask is None else example.loss_mask
            # The first response token is predicted at the last prompt position.
            weights[end - len(example.response_ids) - 1 : end - 1] = np.where(trained, weight, 0.0)
        return cls.of([example.ids for example in examples], weight=weights)
