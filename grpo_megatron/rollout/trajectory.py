"""A trajectory under construction: what the model reads and writes, as the sequences to train on."""

from dataclasses import dataclass, replace

import numpy as np

from grpo_megatron.batch.prompt import Prompt
from grpo_megatron.batch.sample import Sample, WeightSpan
from grpo_megatron.sglang.request import Completion


@dataclass(frozen=True)
class Episode:
    """The description of an episode before it is played."""

    prompt: Prompt
    """The prompt that the model reads first."""
    group_id: int
    """Id of the group, which is all trajectories of the prompt."""
    trajectory_id: int
    """Id of the trajectory that the episode becomes."""
    limit: int
    """Maximal number of tokens after the prompt."""
    state: tuple[int, ...]
    """Key of the environment's initial state. Episodes with the same key start in the same state."""


class _Sequence:
    """A sequence of tokens in the order in which the model read and wrote them, each once."""

    def __init__(self, prompt_ids: list[int]):
        self.ids, self.turns = list(prompt_ids), 0
        self._start = len(self.ids)
        self._mask: list[bool] = []
        self._logprobs: list[float] = []
        self._spans: list[WeightSpan] = []
        self._routing: list[np.ndarray] = []

    def follow(self, ids: list[int]) -> bool:
        """Append the environment's tokens: those of `ids` after the tokens that this sequence has already.

        Return False, and append nothing, if `ids` does not begin with this sequence's tokens.

        ids: all token ids that the model reads before its next turn.
        """
        if ids[: len(self.ids)] != self.ids:
            return False
        self._extend(ids[len(self.ids) :], False, [0.0] * (len(ids) - len(self.ids)))
        return True

    def write(self, turn: Completion) -> None:
        """Append a turn that the model generated."""
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
        """Number of leading tokens whose MoE experts the engine has reported: all that it computed so far.

        The last sampled token of a turn is not among them, because no forward pass has read it yet.
        """
        return sum(map(len, self._routing))

    def sample(self, episode: Episode, finish_reason: str) -> Sample:
        ids = np.array(self.ids, dtype=np.int32)
        return Sample(
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
    """The sequences of an episode. A new one begins when the model's input does not continue the last one."""

    def __init__(self, episode: Episode):
        self._episode = episode
        self._sequences = [_Sequence(episode.prompt.ids.tolist())]

    @property
    def turns(self) -> int:
        return sum(sequence.turns for sequence in self._sequences)

    @property
    def ids(self) -> list[int]:
        """All tokens of the current sequence. Do not modify the list."""
        return self._sequences[-1].ids

    @property
    def room(self) -> int:
        """Number of tokens that the model may write next."""
        return self._room(len(self.ids))

    def _room(self, length: int) -> int:
        return len(self._episode.prompt.ids) + self._episode.limit - length

    @property
    def routed(self) -> int:
        """Number of leading tokens in `ids` whose MoE experts the engine has reported already."""
        return self._sequences[-1].routed

    def read(self, ids: list[int]) -> bool:
        """Set the token ids that the model reads before its next turn. They may begin a new sequence.

        Return False, and change nothing, if they leave the model no token to write within the limit.
        """
        if self._room(len(ids)) <= 0:
            return False
        if not self._sequences[-1].follow(ids):
            if not self._sequences[-1].turns:
                self._sequences.pop()
            self._sequences.append(_Sequence(ids))
        return True

    def write(self, turn: Completion) -> None:
        """Append a turn that the model generated to the current sequence."""
        self._sequences[-1].write(turn)

    def samples(self, finish_reason: str) -> tuple[Sample, ...]:
        """Return the sequences as samples. Rewards and texts are still missing."""
        return tuple(sequence.sample(self._episode, finish_reason) for sequence in self._sequences)


def _whole_routing(parts: list[np.ndarray]) -> np.ndarray | None:
    """Return the routing of a whole sequence, [tokens, layers, experts], or None if the engine reported none.

    parts: routing of each turn. A row is appended for the last token, which the engine sampled but never read
        in a forward pass. Its value has no effect, because the last position predicts nothing.
    """
    if not parts:
        return None
    rows = parts[0]
    anything = np.broadcast_to(np.arange(rows.shape[2], dtype=rows.dtype), (1, *rows.shape[1:]))
    return np.concatenate([*parts, anything])
