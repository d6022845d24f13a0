"""Random ragged batches for the tests of losses, in float64, stored flat like on a rank."""

import itertools
from dataclasses import dataclass, replace

import numpy as np
import torch

from grpo_megatron.algorithm.losses import LossInputs
from grpo_megatron.batch.train_batch import TrainBatch


@dataclass
class Ragged:
    """A batch of t positions. logp and entropy require gradients.

    rows: the positions of each sequence.
    """

    batch: TrainBatch
    logp: torch.Tensor
    entropy: torch.Tensor
    inputs: LossInputs

    @property
    def rows(self) -> list[slice]:
        edges = self.batch.cu_seqlens.tolist()
        return [slice(a, b) for a, b in itertools.pairwise(edges)]

    def trained(self, row: slice) -> list[int]:
        return [t for t in range(row.start, row.stop) if self.inputs.mask[t]]

    def double(self, name: str) -> torch.Tensor:
        return torch.from_numpy(getattr(self.batch, name)).double()


def ragged(seed: int, spread: float = 0.3, current: bool = False, group_size: int = 2) -> Ragged:
    """Return 1 to 6 sequences in groups of group_size, with one advantage and one reward per sequence.

    Outside the mask, everything known before training is 0, as it is stored.

    spread: standard deviation of the policy's log-ratios.
    current: True for no old log-probs.
    """
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 9, rng.integers(1, 7))
    count = int(lengths.sum())
    mask = rng.random(count) < 0.8
    sequence_id = np.repeat(np.arange(len(lengths)), lengths)
    logp = -rng.exponential(2.0, count)

    def near(deviation: float) -> np.ndarray:
        return np.where(mask, logp + rng.normal(0, deviation, count), 0)

    zeros = np.zeros(count)
    batch = TrainBatch(
        cu_seqlens=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32),
        group_id=np.arange(len(lengths)) // group_size,
        trajectory_id=np.arange(len(lengths)) + 40,
        reward=np.random.default_rng([seed, 1]).integers(0, 3, len(lengths)).astype(np.float64),
        tokens=zeros.astype(np.int32),
        loss_mask=mask,
        weight=zeros,
        advantage=np.where(mask, rng.normal(size=len(lengths))[sequence_id], 0),
        rollout_logp=near(spread),
        old_logp=near(spread),
        ref_logp=near(0.5),
    )
    sequence = torch.from_numpy(sequence_id)

    def sequence_sum(values: torch.Tensor) -> torch.Tensor:
        return values.new_zeros(len(lengths)).index_add(0, sequence, values.detach())[sequence]

    tensors = {
        name: torch.from_numpy(getattr(batch, name))
        for name in ("advantage", "rollout_logp", "ref_logp", "old_logp")
    }
    inputs = LossInputs(mask=torch.from_numpy(mask), sequence_sum=sequence_sum, **tensors)
    if current:
        inputs = replace(inputs, old_logp=None)
    return Ragged(
        batch,
        torch.tensor(logp, requires_grad=True),
        torch.tensor(rng.exponential(1.0, count), requires_grad=True),
        inputs,
    )
