"""Loss aggregation, expressed as one weight per sequence.

The loss of an optimizer step is the sum over all trained tokens of weight times token loss. All trained
tokens of a sequence have the same weight. The weights are computed here for the whole optimizer step, so they
alone decide the kind of mean (algorithm.loss_agg_mode). The gradient is then a plain sum over tokens,
micro-batches and ranks, and no rank divides by a count of its own.
"""

import numpy as np

from grpo_megatron.batch.table import SampleTable

LOSS_AGG_MODES = (
    "token-mean",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
    "group-sum",
)


def sequence_weights(
    table: SampleTable, counted: np.ndarray, mode: str, max_response_length: int
) -> np.ndarray:
    """Return the loss weight of the tokens of each of an optimizer step's S sequences, float64 [S].

    table: group and trajectory of each sequence.
    counted: [S], number of tokens of each sequence that the mean includes. A sequence without counted tokens
        gets weight 0.
    mode: kind of mean, algorithm.loss_agg_mode.
    max_response_length: L in the formulas below, in tokens.

    N is the number of counted tokens. G and P are the numbers of trajectories and of groups (prompts) with at
    least one counted token. n_i is the number of counted tokens in the sequence's trajectory i. The modes
    give these weights:

    - token-mean: 1/N (DAPO, arXiv:2503.14476)
    - seq-mean-token-sum: 1/G
    - seq-mean-token-mean: 1/(G n_i) (GRPO, arXiv:2402.03300)
    - seq-mean-token-sum-norm: 1/(G L) (Dr.GRPO, arXiv:2503.20783)
    - group-sum: 1/(P n_i)

    A trajectory that is split over several sequences counts once.

    Raises ValueError for an unknown mode.
    """
    if mode not in LOSS_AGG_MODES:
        raise ValueError(f"unknown loss_agg_mode {mode!r}; known: {', '.join(LOSS_AGG_MODES)}")
    weights = np.zeros(len(counted))
    rows = np.flatnonzero(counted)
    if not len(rows):
        return weights
    _, trajectory = np.unique(table.trajectory_id[rows], return_inverse=True)
    own_tokens = np.bincount(trajectory, counted[rows])
    num_trajectories = len(own_tokens)
    num_groups = len(np.unique(table.group_id[rows]))
    weights[rows] = {
        "token-mean": 1.0 / counted.sum(),
        "seq-mean-token-sum": 1.0 / num_trajectories,
        "seq-mean-token-mean": 1.0 / (num_trajectories * own_tokens[trajectory]),
        "seq-mean-token-sum-norm": 1.0 / (num_trajectories * max_response_length),
        "group-sum": 1.0 / (num_groups * own_tokens[trajectory]),
    }[mode]
    return weights
