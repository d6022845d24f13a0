"""Loss aggregation, expressed as one weight per token.

The loss of an optimizer step is the sum over all tokens of weight times token loss. Its gradient is a plain
sum over tokens, micro-batches and ranks, so no rank ever divides by a count of its own. The kind of mean
(algorithm.loss_agg_mode) is decided only here, over the whole optimizer step.
"""

from dataclasses import replace

import numpy as np

from grpo_megatron.batch.train_batch import TrainBatch

LOSS_AGG_MODES = (
    "token-mean",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
    "group-sum",
)


def token_weights(batch: TrainBatch, mode: str, max_response_length: int) -> np.ndarray:
    """Return the loss weight of each token of one optimizer step, float32 [T], 0 for untrained tokens.

    N is the number of trained tokens. S and P are the numbers of trajectories and groups with at least one
    trained token. n_i is the number of trained tokens in the token's trajectory i. L is max_response_length.
    The modes are:

    - token-mean: 1/N (DAPO, arXiv:2503.14476)
    - seq-mean-token-sum: 1/S
    - seq-mean-token-mean: 1/(S n_i) (GRPO, arXiv:2402.03300)
    - seq-mean-token-sum-norm: 1/(S L) (Dr.GRPO, arXiv:2503.20783)
    - group-sum: 1/(P n_i)

    A trajectory that is split over several sequences counts once. Raises ValueError for an unknown mode.
    """
    mask = batch.loss_mask
    if not mask.any():
        return np.zeros(batch.num_tokens, dtype=np.float32)
    sequence = batch.sequence_id[mask]
    _, trajectory, trained_tokens = np.unique(
        batch.trajectory_id[sequence], return_inverse=True, return_counts=True
    )
    num_trajectories = len(trained_tokens)
    own_tokens = trained_tokens[trajectory]  # n_i at each trained token
    if mode == "token-mean":
        value = np.full(len(sequence), 1.0 / len(sequence))
    elif mode == "seq-mean-token-sum":
        value = np.full(len(sequence), 1.0 / num_trajectories)
    elif mode == "seq-mean-token-mean":
        value = 1.0 / (num_trajectories * own_tokens)
    elif mode == "seq-mean-token-sum-norm":
        value = np.full(len(sequence), 1.0 / (num_trajectories * max_response_length))
    elif mode == "group-sum":
        num_groups = len(np.unique(batch.group_id[sequence]))
        value = 1.0 / (num_groups * own_tokens)
    else:
        raise ValueError(f"unknown loss_agg_mode {mode!r}; known: {', '.join(LOSS_AGG_MODES)}")
    weights = np.zeros(batch.num_tokens, dtype=np.float32)
    weights[mask] = value
    return weights


def weights_after_rejection(
    batch: TrainBatch, kept: np.ndarray, mode: str, max_response_length: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return (weight, policy_factor) for a batch whose rejected tokens lose only the policy term of the loss.

    - weight: float32 [T], `token_weights` over all trained tokens. The means of KL and entropy use this
      weight.
    - policy_factor: float32 [T], multiplies the policy term, so that its mean is taken over the kept tokens
      only: weight · policy_factor = `token_weights` over the kept trained tokens.

    kept: bool [T], False for tokens that the mismatch correction rejected.
    """
    weight = token_weights(batch, mode, max_response_length)
    policy = token_weights(replace(batch, loss_mask=batch.loss_mask & kept), mode, max_response_length)
    factor = np.divide(policy, weight, out=np.zeros_like(weight), where=weight > 0)
    return weight, factor
