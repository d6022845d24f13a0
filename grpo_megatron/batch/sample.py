"""Results of generation: samples, and groups of samples that share a prompt."""

from collections.abc import Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from itertools import groupby
from typing import Any

import numpy as np

from grpo_megatron.batch.arrays import Handle, Here, SampleArrays, Texts, read, values_of
from grpo_megatron.batch.prompt import Prompt

_NO_TEXTS = Here(Texts())


@dataclass(frozen=True, slots=True)
class WeightSpan:
    """A span of response tokens that were generated with one version of the weights.

    version: version of the weights; 0 before the first weight sync.
    start, end: index of the first token in the response, and the index after the last one.
    """

    version: int
    start: int
    end: int


@dataclass(frozen=True)
class Conversation:
    """Token ids of a prompt and its finished response, for a reward model on the trainer's ranks to score."""

    handle: Handle
    """Handle of the token ids, int32 [num_tokens]."""
    num_tokens: int
    """Number of token ids."""

    @classmethod
    def of(cls, ids: np.ndarray) -> "Conversation":
        """Return a conversation that holds its token ids itself, not a handle to the object store.

        ids: int32 [n], n > 0.
        """
        return cls(Here(ids), len(ids))


@dataclass(frozen=True, slots=True)
class Sample:
    """One sequence of a trajectory: a prompt and the response to it. Most trajectories have one sequence.

    A trajectory is one response, or one episode with an environment. An episode has several sequences if
    rollout.history=template renders the conversation anew for each turn, and the new tokens do not start with
    the earlier ones. The new sequence's prompt_ids are then everything that the model read for that turn. All
    sequences of a trajectory have the same reward, components and finish_reason. In means over trajectories,
    the sequences of a trajectory count as one.

    A sample is immutable. `scored` returns a copy with a reward.
    """

    group_id: int
    """Id of the group that this sample belongs to. A group is all trajectories of one prompt."""
    trajectory_id: int
    """Id of the trajectory that this sequence belongs to."""
    handle: Handle
    """Handle of the arrays. `arrays` reads them."""
    num_prompt: int
    """Number of tokens that the model read before its first turn in this sequence."""
    num_response: int
    """Number of tokens after these, written by the model or by the environment."""
    num_trained: int
    """Number of response tokens that are trained on. 0 if a filter excludes the sample from training."""
    finish_reason: str
    """Why generation ended: "stop", "length", "abort" or, for an episode, "max_turns"."""
    weight_spans: tuple[WeightSpan, ...] = ()
    """Spans of the response tokens that the model wrote, with the weight version that generated each span."""
    texts: Handle = _NO_TEXTS
    """Handle of the Texts. `response_text` and `scored_text` read them."""
    reward: float | None = None
    """Reward of the trajectory. None if the reward is not computed yet, or if computing it failed and the
    trajectory is left out."""
    reward_components: dict[str, float] = field(default_factory=dict)
    """{name: value} of terms and other numbers that were computed with the reward, for the logs."""
    turns: int = 1
    """Number of turns that the model wrote in this sequence."""
    reward_failed: bool = False
    """True if computing the reward failed. `reward` is then the configured reward.failure_value, or None if
    the trajectory is left out."""
    conversation: Conversation | None = None
    """The input of a reward model on the trainer's ranks that will score the sample. None: there is none."""

    @classmethod
    def of(
        cls,
        group_id: int,
        trajectory_id: int,
        prompt_ids: np.ndarray,
        response_ids: np.ndarray,
        loss_mask: np.ndarray,
        rollout_logprobs: np.ndarray,
        finish_reason: str,
        *,
        routing: np.ndarray | None = None,
        response_text: str = "",
        scored_text: str | None = None,
        **others: Any,
    ) -> "Sample":
        """Return a sample whose arrays are in this process, and count its tokens.

        prompt_ids: int32 [P], token ids of the prompt.
        response_ids: int32 [R], token ids of the response.
        loss_mask: bool [R], False for response tokens that are not trained on.
        rollout_logprobs: float32 [R], log-prob with which each response token was sampled.
        routing: int [P + R, L, k], the k experts chosen for each token in each of L layers, or None.
        response_text: the response as text.
        scored_text: the part of the text that reward.function scored; None: the whole text.
        others: further fields of Sample.

        Raises ValueError if the response is empty, or if an array has a wrong length.
        """
        try:
            arrays = SampleArrays(prompt_ids, response_ids, loss_mask, rollout_logprobs, routing)
        except ValueError as error:
            raise ValueError(f"trajectory {trajectory_id}: {error}") from error
        counts = (len(prompt_ids), len(response_ids), int(np.count_nonzero(loss_mask)))
        texts = Here(Texts(response_text, scored_text))
        return cls(group_id, trajectory_id, Here(arrays), *counts, finish_reason, texts=texts, **others)

    def __reduce__(self):
        # The driver receives and sends each sample once. The values that ranks do not need are the last ones.
        values = [getattr(self, name) for name in self.__slots__]
        while len(values) > _NUM_REQUIRED and values[-1] == _DEFAULTS[len(values) - _NUM_REQUIRED - 1]:
            values.pop()
        return Sample, tuple(values)

    @property
    def arrays(self) -> SampleArrays:
        """The sample's token ids, loss mask, log-probs and routing, fetched if they are in another process.

        Raises RuntimeError in the driver while the run trains, because reading takes too long there.
        """
        return read([self.handle])[0]

    def __getattr__(self, name: str):
        if name in SampleArrays.__dataclass_fields__:
            raise AttributeError(
                f"a Sample has no {name}, because its tokens may be in another process; `arrays.{name}` reads"
                " them, except in the driver of a run that trains, where filters are called (docs/plugins.md)"
            )
        raise AttributeError(f"Sample has no attribute {name!r}")

    def with_arrays(self, **changes: np.ndarray | None) -> "Sample":
        """Return a copy in which some arrays are replaced. All arrays are fetched first.

        The token counts are computed anew, including `num_trained`.

        changes: {field of SampleArrays: new array}.
        """
        arrays = replace(self.arrays, **changes)
        return replace(
            self,
            handle=Here(arrays),
            num_prompt=len(arrays.prompt_ids),
            num_response=len(arrays.response_ids),
            num_trained=int(np.count_nonzero(arrays.loss_mask)),
        )

    @property
    def response_text(self) -> str:
        """The response as text. If the text is in another process, each access fetches it.

        Use `with_texts_here` to fetch the texts of many samples at once.
        """
        return values_of([self.texts])[0].response

    @property
    def scored_text(self) -> str | None:
        """The part of response_text that reward.function scored; None: the whole text."""
        return values_of([self.texts])[0].scored

    def with_texts(self, response: str, scored: str | None = None) -> "Sample":
        """Return a copy with other texts.

        response: the response as text.
        scored: the part of the response that reward.function scored; None: the whole response.
        """
        return replace(self, texts=Here(Texts(response, scored)))

    @property
    def num_tokens(self) -> int:
        return self.num_prompt + self.num_response

    @property
    def num_written(self) -> int:
        """Number of response tokens that the model wrote, including tokens that are not trained on."""
        return sum(span.end - span.start for span in self.weight_spans)

    @property
    def is_left_out(self) -> bool:
        """True if the trajectory is removed: its reward failed, and reward.on_failure is leave_out."""
        return self.reward_failed and self.reward is None

    def for_ranks(self, with_spans: bool = False) -> "Sample":
        """Return a copy with only the fields that the trainer's ranks need.

        Texts, reward, reward components, finish_reason and conversation are removed, so that less data is
        sent.

        with_spans: True to keep weight_spans, with which the ranks compute the age of each token.
        """
        return replace(
            self,
            finish_reason="",
            weight_spans=self.weight_spans if with_spans else (),
            texts=_NO_TEXTS,
            reward=None,
            reward_components={},
            conversation=None,
        )

    def scored(self, reward: float | None, components: dict[str, float]) -> "Sample":
        return replace(self, reward=reward, reward_components=components)


_DEFAULTS = [
    one.default_factory() if one.default is MISSING else one.default
    for one in fields(Sample)
    if one.default is not MISSING or one.default_factory is not MISSING
]
_NUM_REQUIRED = len(fields(Sample)) - len(_DEFAULTS)


@dataclass(frozen=True)
class Group:
    """All trajectories of one prompt. Algorithms such as GRPO compare the trajectories' rewards."""

    group_id: int
    """Id of the group within the run."""
    prompt: Prompt
    """The prompt that all samples share."""
    samples: tuple[Sample, ...]
    """All sequences of all trajectories. The sequences of a trajectory are adjacent."""
    failed: int = 0
    """Number of trajectories that were left out because their reward or environment failed."""
    engine: int = 0
    """Index of the engine that began to generate the samples. Their arrays are on this engine's node."""

    @property
    def trajectories(self) -> list[tuple[Sample, ...]]:
        """The trajectories, each as a tuple of its sequences in the order in which they were generated."""
        return [
            tuple(sequences)
            for _, sequences in groupby(self.samples, key=lambda sample: sample.trajectory_id)
        ]

    @property
    def rewards(self) -> list[float]:
        """The reward of each trajectory, in the order of `trajectories`; None for an unknown reward."""
        return [sequences[0].reward for sequences in self.trajectories]


def with_texts_here(groups: Sequence[Group]) -> list[Group]:
    """Fetch the texts of all samples at once. Return copies of the groups that hold the texts themselves.

    Reading `response_text` or `scored_text` of these copies fetches nothing.
    """
    texts = iter(values_of([sample.texts for group in groups for sample in group.samples]))
    return [
        replace(group, samples=tuple(replace(one, texts=Here(next(texts))) for one in group.samples))
        for group in groups
    ]
