"""A trajectory under construction: what the model reads and writes, as the sequences to train on."""

from dataclasses import dataclass, replace

import numpy as np

from grpo_megatron.batch.prompt import Prompt
from grpo_megatron.batch.sample import Sample, WeightSpan
from grpo_megatron.sglang.request import Completion


@dataclass(frozen=True)
class Episode:
    """Parameters of one episode: its prompt, its ids, its token limit and its initial state."""

    prompt: Prompt
    """The prompt that the model reads first."""
    group_id: int
    """Id of the group that the episode's samples belong to. A group is all trajectories of one prompt."""
    trajectory_id: int
    """Id of the episode's trajectory. All samples of the episode have this id."""
    limit: int
    """Maximum number of tokens after the prompt, written by the model or by the environment."""
    state: tuple[int, ...]
    """Seed of the environment's initial state. Episodes with equal seeds start in the same state."""


class _Sequence:
    """One sequence of tokens: a prompt, and the turns and observations that follow it in an episode."""

    def __init__(self, prompt_ids: list[int]):
        self.ids, self.turns = list(prompt_ids), 0
        self._start = len(self.ids)
        self._mask: list[bool] = []
        self._logprobs: list[float] = []
        self._spans: list[WeightSpan] = []
        self._routing: list[np.ndarray] = []

    def follow(self, ids: list[int]) -> bool:
        """Extend this sequence to `ids`, if `ids` begins with this sequence, and return True.

        The appended tokens are marked as written by the environment, not by the model. If `ids` does not
        begin with this sequence, nothing is appended, and the result is False.

        ids: all token ids that the model reads before its next turn.
        """
        if ids[: len(self.ids)] != self.ids:
            return False
        self._extend(ids[len(self.ids) :], False, [0.0] * (len(ids) - len(self.ids)))
        return True

    def write(self, turn: Completion) -> None:
        """Append a turn that the model generated to this sequence."""
        start = len(self._mask)
        self._spans += [
            replace(span, start=start + span.start, end=start + span.end) for span in turn.weight_spans
        ]
        self._extend(turn.response_ids.tolist(), True, turn.logprobs.tolist())
        if turn.routing is not None:
            self._routing.append(turn.routing)
        self.turns += 1

    def _extend(self, ids: list[int], by_model: bool, logprobs: list[float]) -> None:
        self.ids += ids
        self._mask += [by_model] * len(ids)
        self._logprobs += logprobs

    @property
    def routed(self) -> int:
        """Number of leading tokens of the sequence for which the engine has reported the chosen MoE experts.

        The last token of the newest turn is not among them: the engine chooses a token's experts in the
        forward pass that reads the token, and no pass has read the last one. 0 if no experts are reported.
        """
        return sum(map(len, self._routing))

    def sample(self, episode: Episode, finish_reason: str) -> Sample:
        ids = np.array(self.ids, dtype=np.int32)
        return Sample.of(
            group_id=episode.group_id,
            trajectory_id=episode.trajectory_id,
            prompt_ids=ids[: self._start],
            response_ids=ids[self._start :],
            loss_mask=np.array(self._mask, dtype=np.bool_),
            rollout_logprobs=np.array(self._logprobs, dtype=np.float32),
            finish_reason=finish_reason,
            weight_spans=tuple(self._spans),
            routing=_whole_routing(self._routing),
            turns=self.turns,
        )


class Trajectory:
    """The token sequences of an episode under construction. Most episodes have one sequence.

    A new sequence begins when the input of a turn does not start with all tokens of the last sequence.
    """

    def __init__(self, episode: Episode):
        self._episode = episode
        self._sequences = [_Sequence(episode.prompt.ids.tolist())]

    @property
    def turns(self) -> int:
        return sum(sequence.turns for sequence in self._sequences)

    @property
    def ids(self) -> list[int]:
        """Token ids of the last sequence, including the prompt. Do not modify the list."""
        return self._sequences[-1].ids

    @property
    def room(self) -> int:
        """Number of tokens that the model's next turn may have: what is left of the episode's token limit."""
        return self._room(len(self.ids))

    def _room(self, length: int) -> int:
        return len(self._episode.prompt.ids) + self._episode.limit - length

    @property
    def routed(self) -> int:
        """Number of leading tokens of the last sequence for which the engine has reported the MoE experts.

        The engine need not report them again in the next turn.
        """
        return self._sequences[-1].routed

    def read(self, ids: list[int]) -> bool:
        """Set the tokens that the model reads before its next turn. Return True if there is room for a turn.

        If `ids` starts with the tokens of the last sequence, the last sequence is extended. Otherwise a new
        sequence begins, which replaces the last one if the last one has no turn yet. If the episode's token
        limit leaves no token for the next turn, nothing changes, and the result is False.

        ids: all token ids that the model reads before its next turn.
        """
        if self._room(len(ids)) <= 0:
            return False
        if not self._sequences[-1].follow(ids):
            if not self._sequences[-1].turns:
                self._sequences.pop()
            self._sequences.append(_Sequence(ids))
        return True

    def write(self, turn: Completion) -> None:
        """Append a turn that the model generated to the last sequence."""
        self._sequences[-1].write(turn)

    def samples(self, finish_reason: str) -> tuple[Sample, ...]:
        """Return the sequences as Samples with this finish reason, but without rewards and texts.

        A last sequence without a turn is left out. It is there if the episode failed while its next turn was
        being generated.
        """
        return tuple(
            sequence.sample(self._episode, finish_reason) for sequence in self._sequences if sequence.turns
        )


def _whole_routing(parts: list[np.ndarray]) -> np.ndarray | None:
    """Return the MoE experts of a sequence, [tokens, layers, experts per token], or None if `parts` is empty.

    The engine reports no experts for the last token, because no forward pass has read this token. A row of
    arbitrary experts is added for it. The row has no effect, because the last position predicts nothing.

    parts: for each turn, the experts that the engine reported (Completion.routing), in order.
    """
    if not parts:
        return None
    rows = parts[0]
    anything = np.broadcast_to(np.arange(rows.shape[2], dtype=rows.dtype), (1, *rows.shape[1:]))
    return np.concatenate([*parts, anything])
