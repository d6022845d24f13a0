"""TrainBatch: after generation everything is flat.

A struct of arrays over one token stream. Every per-token array is stored at the position whose
logits predict it: position t predicts ``target[t] = tokens[t+1]``, and the last position of each
sequence predicts nothing (mask False, weight 0). No code downstream shifts, slices out responses
or re-aligns.
"""

from dataclasses import dataclass, fields

import numpy as np

from grpo_megatron.batch.sample import Sample

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
    """T tokens in S sequences, NumPy, on the CPU until a rank takes its slice.

    cu_seqlens int32 [S+1]; group_id and trajectory_id int64 [S]; reward float32 [S]; all others [T]:
    tokens, target int32; loss_mask bool (trained tokens); weight, advantage, rollout_logp,
    old_logp, ref_logp float32, natural log, zero where unknown. routing int [T, L, k] or None: the
    experts of each token in each of the L layers with experts, as the engine chose them.
    policy_factor float32 [T] or None (1 everywhere): multiplies the policy term of the loss. number
    int64 [T] or None: place of each token in the step, by which a metric names it.
    """

    cu_seqlens: np.ndarray
    group_id: np.ndarray
    trajectory_id: np.ndarray
    reward: np.ndarray
    tokens: np.ndarray
    target: np.ndarray
    loss_mask: np.ndarray
    weight: np.ndarray
    advantage: np.ndarray
    rollout_logp: np.ndarray
    old_logp: np.ndarray
    ref_logp: np.ndarray
    routing: np.ndarray | None = None
    policy_factor: np.ndarray | None = None
    number: np.ndarray | None = None

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
        if not samples:
            raise ValueError("a TrainBatch needs at least one sample")
        lengths = np.array([sample.num_tokens for sample in samples])
        cu_seqlens = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        arrays = {name: np.zeros(cu_seqlens[-1], dtype) for name, dtype in _TOKEN_ARRAYS.items()}
        for sample, start, end in zip(samples, cu_seqlens[:-1], cu_seqlens[1:], strict=True):
            arrays["tokens"][start:end] = np.concatenate([sample.prompt_ids, sample.response_ids])
            arrays["target"][start : end - 1] = arrays["tokens"][start + 1 : end]
            # The first response token is predicted at the last prompt position.
            predicts = slice(start + len(sample.prompt_ids) - 1, end - 1)
            arrays["loss_mask"][predicts] = sample.loss_mask
            arrays["rollout_logp"][predicts] = sample.rollout_logprobs
        routed = [sample.routing for sample in samples if sample.routing is not None]
        if routed and len(routed) != len(samples):
            raise ValueError(
                f"{len(routed)} of {len(samples)} samples carry the engine's routing; all must, or none"
            )
        return cls(
            routing=np.concatenate(routed) if routed else None,
            cu_seqlens=cu_seqlens,
            group_id=np.array([sample.group_id for sample in samples], dtype=np.int64),
            trajectory_id=np.array([sample.trajectory_id for sample in samples], dtype=np.int64),
            reward=np.array(
                [np.nan if sample.reward is None else sample.reward for sample in samples], dtype=np.float32
            ),
            **arrays,
        )

    @classmethod
    def concatenate(cls, parts: list["TrainBatch"]) -> "TrainBatch":
        """The sequences of all parts, one after the other; copies."""
        arrays = {
            "cu_seqlens": np.concatenate([[0], np.cumsum(np.concatenate([p.lengths for p in parts]))]).astype(
                np.int32
            )
        }
        for spec in fields(cls):
            found = [getattr(part, spec.name) for part in parts]
            if spec.name != "cu_seqlens" and all(array is not None for array in found):
                arrays[spec.name] = np.concatenate(found)
        return cls(**arrays)

    def set(self, **arrays: np.ndarray | None) -> None:
        """Put these arrays in place of the ones the batch has; each of the shape that its field has."""
        for name, array in arrays.items():
            if array is not None and array.shape[:1] != self.tokens.shape:
                raise ValueError(f"{name} has {len(array)} entries for {self.num_tokens} tokens")
            setattr(self, name, array)

    @property
    def num_sequences(self) -> int:
        return len(self.cu_seqlens) - 1

    @property
    def num_tokens(self) -> int:
        return int(self.cu_seqlens[-1])

    @property
    def lengths(self) -> np.ndarray:
        """int64 [S]: tokens of each sequence."""
        return np.diff(self.cu_seqlens).astype(np.int64)

    @property
    def sequence_id(self) -> np.ndarray:
        """int64 [T]: the sequence each token belongs to."""
        return np.repeat(np.arange(self.num_sequences), self.lengths)

    def token_index(self, sequences) -> np.ndarray:
        """int64: positions in the stream of the given sequences' tokens, in their order."""
        return np.concatenate([np.arange(self.cu_seqlens[i], self.cu_seqlens[i + 1]) for i in sequences])

    def select(self, sequences) -> "TrainBatch":
        """The batch of the given sequences (indices, in that order)."""
        sequences = np.asarray(sequences, dtype=np.int64)
        index = self.token_index(sequences)
        per_sequence = {"group_id", "trajectory_id", "reward"}
        chosen = {"cu_seqlens": np.concatenate([[0], np.cumsum(self.lengths[sequences])]).astype(np.int32)}
        for spec in fields(self):
            array = getattr(self, spec.name)
            if spec.name != "cu_seqlens" and array is not None:
                chosen[spec.name] = array[sequences if spec.name in per_sequence else index]
        return TrainBatch(**chosen)
