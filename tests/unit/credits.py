"""Advantages of tokens that are given as arrays, for the tests of estimators."""

import numpy as np

from grpo_megatron.algorithm.advantages import AdvantageInputs, advantages
from grpo_megatron.batch.sums import SequenceSums, suffix_sums
from grpo_megatron.batch.table import SampleTable
from grpo_megatron.config.algorithm import AlgorithmConfig


class Tokens:
    """S sequences whose T tokens have a KL each.

    lengths: number of tokens of each sequence. mask: bool [T], True for trained tokens; None: all.
    kl: float [T] or None.
    """

    def __init__(self, reward, group_id, lengths, trajectory_id=None, mask=None, kl=None):
        size, total = len(lengths), int(np.sum(lengths))
        trajectory_id = np.arange(size) if trajectory_id is None else np.array(trajectory_id)
        reward = np.array(reward, dtype=np.float64)
        self.table = SampleTable(np.array(group_id), trajectory_id, reward, np.array(lengths))
        self.cu_seqlens = np.concatenate([[0], np.cumsum(lengths)]).astype(int)
        self.sequence = np.repeat(np.arange(size), lengths)
        self.mask = np.ones(total, bool) if mask is None else np.array(mask, dtype=bool)
        self.kl = None if kl is None else np.where(self.mask, np.array(kl, dtype=np.float64), 0.0)

    def inputs(self, kl_coef: float = 1.0) -> AdvantageInputs:
        sums = SequenceSums.of(self.cu_seqlens, self.mask, self.mask, self.kl)
        return AdvantageInputs(self.table, sums, 0.0 if self.kl is None else kl_coef)

    def advantages(self, options: AlgorithmConfig) -> np.ndarray:
        """Return the advantages of all tokens, float32 [T], with the KL in the reward times 1."""
        suffix = None if self.kl is None else suffix_sums(self.cu_seqlens, self.kl)
        return advantages(self.inputs(), options).of_tokens(self.sequence, self.mask, suffix)
