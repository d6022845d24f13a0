"""A trajectory while it is played: what the model read and wrote, as the sequences to train on."""

from dataclasses import dataclass, replace

import numpy as np

from grpo_megatron.batch.prompt import Prompt
from grpo_megatron.batch.sample import Sample, WeightSpan
from grpo_megatron.sglang.engine import Completion


@dataclass(frozen=True)
class Episode:
    """What is to be played. limit: most tokens after the prompt; state: episodes with the same one (and the same
    run.seed) begin in the same state of the environment."""

    prompt: Prompt
    group_id: int
    trajectory_id: int
    limit: int
    state: tuple[int, ...]


class _Sequence:
    """Tokens that the model read and wrote one after the other, each of them once."""

    def __init__(self, prompt_ids: list[int]):
        self.ids, self.turns = list(prompt_ids), 0
        self._start = len(self.ids)
        self._mask: list[bool] = []
        self._logprobs: list[float] = []
        self._spans: list[WeightSpan] = []
        self._routing: list[np.ndarray] = []

    def follow(self, ids: list[int]) -> bool:
        """Take what an environment put behind the sequence; False if `ids` are not its continuation."""
        if ids[: len(self.ids)] != self.ids:
            return False
        self._extend(ids[len(self.ids) :], False, [0.0] * (len(ids) - len(self.ids)))
        return True

    def write(self, turn: Completion) -> None:
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
        """Of how many tokens the experts are known: all that the engine computed, but not the one it sampled last."""
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
    """Turns of the model, each with all that it read before: another sequence begins where that is no continuation."""

    def __init__(self, episode: Episode):
        self._episode = episode
        self._sequences = [_Sequence(episode.prompt.ids.tolist())]

    @property
    def turns(self) -> int:
        return sum(sequence.turns for sequence in self._sequences)

    @property
    def ids(self) -> list[int]:
        """All that the model read and wrote last; not to be changed."""
        return self._sequences[-1].ids

    @property
    def room(self) -> int:
        """Tokens that the model may write next."""
        return self._room(len(self.ids))

    def _room(self, length: int) -> int:
        return len(self._episode.prompt.ids) + self._episode.limit - length

    @property
    def routed(self) -> int:
        """Of how many of `ids` the experts are known."""
        return self._sequences[-1].routed

    def read(self, ids: list[int]) -> bool:
        """What the model reads before its next turn, all of it. False, and nothing is done, where that leaves it no room to write."""
        if self._room(len(ids)) <= 0:
            return False
        if not self._sequences[-1].follow(ids):
            if not self._sequences[-1].turns:
                self._sequences.pop()
            self._sequences.append(_Sequence(ids))
        return True

    def write(self, turn: Completion) -> None:
        self._sequences[-1].write(turn)

    def samples(self, finish_reason: str) -> tuple[Sample, ...]:
        """Not scored yet, and without their texts."""
        return tuple(sequence.sample(self._episode, finish_reason) for sequence in self._sequences)


def _whole_routing(parts: list[np.ndarray]) -> np.ndarray | None:
    """With a row for the last token, which the engine sampled but never computed.

    Nothing depends on it: the last position predicts nothing, and no other attends to it.
    """
    if not parts:
        return None
    rows = parts[0]
    anything = np.broadcast_to(np.arange(rows.shape[2], dtype=rows.dtype), (1, *rows.shape[1:]))
    return np.concatenate([*parts, anything])
