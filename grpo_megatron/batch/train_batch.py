"""The flat training batch, the form of all data between generation and training.

A TrainBatch is a struct of arrays over one token stream. The values of a token, such as its log-prob, are
stored at the position whose logits predict the token: position t predicts ``target[t] = tokens[t+1]``. The
last position of each sequence predicts nothing (mask False, weight 0). So no later code has to shift or
re-align arrays, or to cut out responses.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import islice

import numpy as np

from grpo_megatron.batch.arrays import Here, read
from grpo_megatron.batch.sample import Sample
from grpo_megatron.batch.table import SampleTable

_TOKEN_ARRAYS = {
    "tokens": np.int32,
    "target": np.int32,
    "loss_mask": np.bool_,
    "weight": np.float32,
    "advantage": np.float32,
    "rollout_logp": np.float32,
    "old_logp": np.float32,
    "ref_logp": np.float32,
}


@dataclass
class TrainBatch:
    """A batch of T tokens in S sequences, as NumPy arrays on the CPU.

    The values of a token, such as its log-prob or advantage, are stored at the position that predicts the
    token: position t predicts tokens[t + 1]. Only `tokens` and `routing` are stored at the token's own
    position. Log-probs are natural logs, and zero where unknown.
    """

    cu_seqlens: np.ndarray
    """int32 [S+1]. Start of each sequence in the token stream, and the end of the last one."""
    group_id: np.ndarray
    """int64 [S]. Id of each sequence's group, which is all trajectories of one prompt."""
    trajectory_id: np.ndarray
    """int64 [S]. Id of the trajectory that each sequence belongs to."""
    reward: np.ndarray
    """float32 [S]. Reward of each sequence's trajectory."""
    tokens: np.ndarray
    """int32 [T]. Token ids."""
    target: np.ndarray
    """int32 [T]. Token id that each position predicts: the id at the next position."""
    loss_mask: np.ndarray
    """bool [T]. True for trained tokens."""
    weight: np.ndarray
    """float32 [T]. Weight of the token's loss in the optimizer step's sum (batch/sequence_weights.py)."""
    advantage: np.ndarray
    """float32 [T]. Advantage of each token. Zero for untrained tokens."""
    rollout_logp: np.ndarray
    """float32 [T]. Log-prob of `target` under the engine's policy, when the token was sampled."""
    old_logp: np.ndarray
    """float32 [T]. Log-prob of `target` under the trainer's policy before the step."""
    ref_logp: np.ndarray
    """float32 [T]. Log-prob of `target` under the reference policy."""
    routing: np.ndarray | None = None
    """int [T, L, k]. The k experts that the engine chose for each token in each of L MoE layers. None: not
    recorded."""
    policy_factor: np.ndarray | None = None
    """float32 [T]. Multiplies the policy term of the loss, not KL and entropy. None: 1 everywhere."""

    def __post_init__(self):
        for name in ("group_id", "trajectory_id", "reward"):
            if len(getattr(self, name)) != self.num_sequences:
                raise ValueError(
                    f"{name} has {len(getattr(self, name))} entries for {self.num_sequences} sequences"
                )
        for name in _TOKEN_ARRAYS:
            if len(getattr(self, name)) != self.num_tokens:
                raise ValueError(
                    f"{name} has {len(getattr(self, name))} entries for {self.num_tokens} tokens"
                )

    @classmethod
    def from_samples(cls, samples: list[Sample]) -> "TrainBatch":
        """Return a batch with one sequence per sample, in the order of `samples`.

        Weights, advantages, and the log-probs of old and reference policy are 0, to be computed later.
        """
        if not samples:
            raise ValueError("a TrainBatch needs at least one sample")
        table = SampleTable.of(samples)
        cu_seqlens = np.concatenate([[0], np.cumsum(table.num_tokens)]).astype(np.int32)
        arrays = {name: np.zeros(cu_seqlens[-1], dtype) for name, dtype in _TOKEN_ARRAYS.items()}
        given = read([sample.handle for sample in samples])
        for sample, own, start, end in zip(samples, given, cu_seqlens[:-1], cu_seqlens[1:], strict=True):
            arrays["tokens"][start:end] = np.concatenate([own.prompt_ids, own.response_ids])
            arrays["target"][start : end - 1] = arrays["tokens"][start + 1 : end]
            # The first response token is predicted at the last prompt position.
            predicts = slice(start + sample.num_prompt - 1, end - 1)
            arrays["loss_mask"][predicts] = own.loss_mask if sample.num_trained else False
            arrays["rollout_logp"][predicts] = own.rollout_logprobs
        routed = [own.routing for own in given if own.routing is not None]
        if routed and len(routed) != len(samples):
            raise ValueError(
                f"{len(routed)} of {len(samples)} samples carry the engine's routing; either all samples "
                "must carry it, or none"
            )
        return cls(
            routing=np.concatenate(routed) if routed else None,
            cu_seqlens=cu_seqlens,
            group_id=table.group_id,
            trajectory_id=table.trajectory_id,
            reward=table.reward,
            **arrays,
        )

    def set(self, **arrays: np.ndarray | None) -> None:
        """Replace the named per-token arrays of the batch, such as advantage=..., in place.

        arrays: {attribute name: array [T, ...] or None}.
        """
        for name, array in arrays.items():
            if array is not None and array.shape[:1] != self.tokens.shape:
                raise ValueError(f"{name} has {len(array)} entries for {self.num_tokens} tokens")
            setattr(self, name, array)

    @property
    def table(self) -> SampleTable:
        """Group, trajectory, reward and length of each sequence."""
        return SampleTable(self.group_id, self.trajectory_id, self.reward, self.lengths)

    @property
    def num_sequences(self) -> int:
        return len(self.cu_seqlens) - 1

    @property
    def num_tokens(self) -> int:
        return int(self.cu_seqlens[-1])

    @property
    def lengths(self) -> np.ndarray:
        """Number of tokens of each of the S sequences, int64 [S]."""
        return np.diff(self.cu_seqlens).astype(np.int64)

    @property
    def sequence_id(self) -> np.ndarray:
        """Index of the sequence that each of the T tokens belongs to, int64 [T]."""
        return np.repeat(np.arange(self.num_sequences), self.lengths)

    def token_index(self, sequences) -> np.ndarray:
        """Return the indices in the token stream of all tokens of the given sequences, int64 [n].

        sequences: indices of sequences. Their tokens are returned in this order.
        """
        return np.concatenate([np.arange(self.cu_seqlens[i], self.cu_seqlens[i + 1]) for i in sequences])

    def select(self, sequences) -> "TrainBatch":
        """Return a new batch with only some of the sequences.

        sequences: indices of the sequences, in the order that the new batch will have.
        """
        sequences = np.asarray(sequences, dtype=np.int64)
        index = self.token_index(sequences)
        per_sequence = {"group_id", "trajectory_id", "reward"}
        chosen = {"cu_seqlens": np.concatenate([[0], np.cumsum(self.lengths[sequences])]).astype(np.int32)}
        for spec in fields(self):
            array = getattr(self, spec.name)
            if spec.name != "cu_seqlens" and array is not None:
                chosen[spec.name] = array[sequences if spec.name in per_sequence else index]
        return TrainBatch(**chosen)


def fetched_batches(parts: Sequence[Sequence[Sample]]) -> list[TrainBatch]:
    """Return a batch for each part of some samples. The arrays of all parts are fetched at once."""
    every = [sample for part in parts for sample in part]
    fetched = zip(every, read([sample.handle for sample in every]), strict=True)
    here = (replace(sample, handle=Here(arrays)) for sample, arrays in fetched)
    return [TrainBatch.from_samples(list(islice(here, len(part)))) for part in parts]
