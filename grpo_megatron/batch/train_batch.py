"""The training batch of reinforcement learning: a token stream with what the policy's loss needs."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np

from grpo_megatron.batch.arrays import Here, read, with_routing_here
from grpo_megatron.batch.sample import Sample
from grpo_megatron.batch.table import SampleTable
from grpo_megatron.batch.token_stream import TokenStream

_TOKEN_ARRAYS = {
    "loss_mask": np.bool_,
    "weight": np.float32,
    "advantage": np.float32,
    "rollout_logp": np.float32,
    "old_logp": np.float32,
    "ref_logp": np.float32,
}


@dataclass(kw_only=True)
class TrainBatch(TokenStream):
    """A batch of S samples, one sequence each, for RL training: T tokens, and the values that the loss needs.

    The values of a token, such as its log-prob or advantage, are stored at the position that predicts the
    token. The last position of each sequence predicts nothing (mask False, weight 0). Log-probs are natural
    logs, and zero where unknown.
    """

    group_id: np.ndarray
    """int64 [S]. Id of each sequence's group, which is all trajectories of one prompt."""
    trajectory_id: np.ndarray
    """int64 [S]. Id of the trajectory that each sequence belongs to."""
    reward: np.ndarray
    """float32 [S]. Reward of each sequence's trajectory."""
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
    policy_factor: np.ndarray | None = None
    """float32 [T]. Multiplies the policy term of the loss, not KL and entropy. None: 1 everywhere."""
    age: np.ndarray | None = None
    """int32 [T]. Number of changes of the weights since the token was sampled. None: 0 everywhere."""

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
    def from_samples(cls, samples: list[Sample], version: int | None = None) -> "TrainBatch":
        """Return a batch with one sequence per sample, in the order of `samples`.

        Weights, advantages, and the log-probs of old and reference policy are 0, to be computed later. The
        loss mask of a sample with num_trained=0 is all False.

        version: version of the trainer's weights, from which the age of each token is computed (`age`, the
            number of weight changes since the token was sampled). None: `age` is None.

        Raises ValueError if only some of the samples have routing, and RuntimeError in the driver while a run
        trains, because the driver must not read tokens then.
        """
        table = SampleTable.of(samples)
        given = with_routing_here(read([sample.handle for sample in samples]))
        arrays = {name: np.zeros(table.num_tokens.sum(), dtype) for name, dtype in _TOKEN_ARRAYS.items()}
        age = None if version is None else np.zeros(table.num_tokens.sum(), np.int32)
        ends = np.cumsum(table.num_tokens)
        for sample, own, end in zip(samples, given, ends, strict=True):
            # The first response token is predicted at the last prompt position.
            predicts = slice(end - sample.num_response - 1, end - 1)
            arrays["loss_mask"][predicts] = own.loss_mask if sample.num_trained else False
            arrays["rollout_logp"][predicts] = own.rollout_logprobs
            for span in () if age is None else sample.weight_spans:
                age[predicts][span.start : span.end] = version - span.version
        routed = [own.routing for own in given if own.routing is not None]
        if routed and len(routed) != len(samples):
            raise ValueError(
                f"{len(routed)} of {len(samples)} samples carry the engine's routing; either all samples "
                "must carry it, or none"
            )
        return cls.of(
            [np.concatenate([own.prompt_ids, own.response_ids]) for own in given],
            routing=np.concatenate(routed) if routed else None,
            group_id=table.group_id,
            trajectory_id=table.trajectory_id,
            reward=table.reward,
            age=age,
            **arrays,
        )

    def set(self, **arrays: np.ndarray | None) -> None:
        """Replace the named per-token arrays of the batch, such as advantage=..., in place.

        arrays: {attribute name: array [T, ...] or None}.

        Raises ValueError if an array does not have T entries.
        """
        for name, array in arrays.items():
            if array is not None and array.shape[:1] != self.tokens.shape:
                raise ValueError(f"{name} has {len(array)} entries for {self.num_tokens} tokens")
            setattr(self, name, array)

    @property
    def table(self) -> SampleTable:
        """Group, trajectory, reward and length of each sequence."""
        return SampleTable(self.group_id, self.trajectory_id, self.reward, self.lengths)


def fetched_batches(
    parts: Sequence[Sequence[Sample]], stage: int, version: int | None = None
) -> list[TrainBatch]:
    """Return one TrainBatch for each list of samples. The arrays of all samples are fetched at once.

    parts: lists of samples, such as those of each micro-batch.
    stage: pipeline stage of this rank. Only the routing of this stage's layers is fetched.
    version: version of the trainer's weights, from which the age of each token is computed. None: no ages.
    """
    every = [sample for part in parts for sample in part]
    fetched = with_routing_here(read([sample.handle for sample in every]), stage)
    here = (replace(sample, handle=Here(arrays)) for sample, arrays in zip(every, fetched, strict=True))
    return [TrainBatch.from_samples(list(islice(here, len(part))), version) for part in parts]
