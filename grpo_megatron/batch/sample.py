"""What generation produces: Samples, in Groups that share a prompt."""

from dataclasses import dataclass, field, replace
from itertools import groupby

import numpy as np

from grpo_megatron.batch.prompt import Prompt


@dataclass(frozen=True)
class WeightSpan:
    """Response tokens [start, end) were generated under weight version `version`."""

    version: int
    start: int
    end: int


@dataclass(frozen=True)
class Sample:
    """One sequence of a trajectory; most trajectories are one. Immutable; `scored` returns the copy that carries its reward.

    prompt_ids int32 [P]; response_ids int32 [R]; loss_mask bool [R], False on text the model did not write;
    rollout_logprobs float32 [R], natural log, as sampled (after temperature); turns: how often the model
    wrote in it. routing int16 [P + R, L, k] or None: the experts of each token in each of the model's L
    layers with experts, as the engine chose them. reward_failed: its reward is reward.failure_value, or None
    if its trajectory is to be left out of the group. scored_text: what of response_text reward.function
    scored, which of an episode is the last turn; None: all of it.

    A trajectory is one response, or one episode with an environment. Where what the model reads in a turn does not begin with what
    it read and wrote before (rollout.history=template), another sequence begins: its prompt_ids are all that the model read then.
    The sequences of a trajectory have its reward, components and finish_reason ("stop", "length", "abort", or "max_turns"
    of an episode), and count once together.
    """

    group_id: int
    trajectory_id: int
    prompt_ids: np.ndarray
    response_ids: np.ndarray
    loss_mask: np.ndarray
    rollout_logprobs: np.ndarray
    finish_reason: str
    weight_spans: tuple[WeightSpan, ...] = ()
    response_text: str = ""
    reward: float | None = None
    reward_components: dict[str, float] = field(default_factory=dict)
    routing: np.ndarray | None = None
    turns: int = 1
    reward_failed: bool = False
    scored_text: str | None = None

    def __post_init__(self):
        length = len(self.response_ids)
        if length == 0:
            raise ValueError(f"trajectory {self.trajectory_id}: empty response")
        if len(self.loss_mask) != length or len(self.rollout_logprobs) != length:
            raise ValueError(
                f"trajectory {self.trajectory_id}: {length} response tokens, {len(self.loss_mask)} mask values, "
                f"{len(self.rollout_logprobs)} log-probs"
            )
        if self.routing is not None and len(self.routing) != self.num_tokens:
            raise ValueError(
                f"trajectory {self.trajectory_id}: {self.num_tokens} tokens, but the routing of {len(self.routing)}"
            )

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_ids) + len(self.response_ids)

    @property
    def num_written(self) -> int:
        """Response tokens that the model wrote, whether they are trained or not."""
        return sum(span.end - span.start for span in self.weight_spans)

    @property
    def is_left_out(self) -> bool:
        """Return whether reward.on_failure=leave_out takes this sample's trajectory out of its group."""
        return self.reward_failed and self.reward is None

    def scored(self, reward: float | None, components: dict[str, float]) -> "Sample":
        return replace(self, reward=reward, reward_components=components)


@dataclass(frozen=True)
class Group:
    """All trajectories of one prompt; GRPO compares them with each other.

    samples: the sequences, those of a trajectory one after the other. failed: how many trajectories were left
    out of it, because their rewards or environments failed.
    """

    group_id: int
    prompt: Prompt
    samples: tuple[Sample, ...]
    failed: int = 0

    @property
    def trajectories(self) -> list[tuple[Sample, ...]]:
        """The sequences of each, in the order in which they were played."""
        return [
            tuple(sequences)
            for _, sequences in groupby(self.samples, key=lambda sample: sample.trajectory_id)
        ]

    @property
    def rewards(self) -> list[float]:
        """One for each trajectory."""
        return [sequences[0].reward for sequences in self.trajectories]
