"""Groups by beam search: the K sequences that transformers' generate(num_beams=K, num_return_sequences=K) finds.

The rules are those of transformers 5.19 (GenerationMixin._beam_search). The engine is asked for one more token of every live beam at a
time, and for the likeliest tokens at that place. Its prefix cache keeps what is computed already. SGLang 0.5.23 has a beam search of its
own, which ends by other rules and says no log-probs of tokens; 0.5.17 has none.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from grpo_megatron.batch.sample import WeightSpan
from grpo_megatron.config.rollout import BeamConfig, EarlyStopping
from grpo_megatron.sglang.engine import Completion

# (which of the live beams, its tokens so far, how many of the likeliest next tokens) -> the engine's answer, of one token
Ask = Callable[[int, list[int], int], Awaitable[Completion]]


@dataclass(frozen=True)
class Beam:
    """A sequence that was begun: its tokens, the log-prob of each, and which weights each is from. total: the sum of the log-probs."""

    ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    versions: tuple[int, ...] = ()
    total: float = 0.0

    def then(self, token: int, logprob: float, version: int) -> "Beam":
        return Beam(
            (*self.ids, token), (*self.logprobs, logprob), (*self.versions, version), self.total + logprob
        )


class BeamSearch:
    """One group's search, which knows no engine: `live` says what to ask for, `advance` takes the answers, until `done`."""

    def __init__(self, width: int, ends: Iterable[int], limit: int, config: BeamConfig):
        """width: beams, and sequences that are found. ends: ids of tokens that end a sequence. limit: most tokens of one."""
        self._width, self._ends, self._limit, self._config = width, frozenset(ends), limit, config
        # So many that as many beams as there were can go on, whichever of them end.
        self.candidates = max(2, 1 + len(self._ends)) * width
        self.live = [Beam()]
        self.finished: list[tuple[float, Beam]] = []  # scores and beams, the best first
        self.done = False

    def advance(self, answers: list[Completion]) -> None:
        """One token further. answers: of each live beam, with its `candidates` likeliest next tokens."""
        found = [
            (beam.total + logprob, beam, token, logprob, answer.weight_spans[0].version)
            for beam, answer in zip(self.live, answers, strict=True)
            for token, logprob in zip(
                answer.top_ids[0].tolist(), answer.top_logprobs[0].tolist(), strict=True
            )
        ]
        found.sort(key=lambda candidate: -candidate[0])
        length = len(self.live[0].ids) + 1
        self.live = []
        for place, (total, beam, token, logprob, version) in enumerate(found[: self.candidates]):
            if token in self._ends or length == self._limit:
                # Those behind the first ones are only there so that enough go on, and do not count where they end.
                if place < self._width:
                    self.finished.append((self._score(total, length), beam.then(token, logprob, version)))
            elif len(self.live) < self._width:
                self.live.append(beam.then(token, logprob, version))
        self.finished.sort(key=lambda pair: -pair[0])
        del self.finished[self._width :]
        self.done = not self.live or not self._can_improve(length)

    def _score(self, total: float, length: int) -> float:
        return total / length**self._config.length_penalty

    def _can_improve(self, length: int) -> bool:
        """Whether the search goes on. length: of the live beams."""
        stopping = self._config.early_stopping
        if len(self.finished) < self._width:
            return True
        if stopping == EarlyStopping.complete:
            return False
        if stopping == EarlyStopping.never and self._config.length_penalty > 0:
            length = self._limit
        return self._score(self.live[0].total, length) > self.finished[-1][0]

    def completions(self, group: int) -> list[Completion]:
        """The sequences that were found, the best first, as if each had been sampled."""
        return [self._completion(beam, (group, number)) for number, (_, beam) in enumerate(self.finished)]

    def _completion(self, beam: Beam, key: tuple[int, int]) -> Completion:
        spans, start = [], 0
        for version, tokens in groupby(beam.versions):
            end = start + len(list(tokens))
            spans.append(WeightSpan(version, start, end))
            start = end
        return Completion(
            key=key,
            response_ids=np.array(beam.ids, dtype=np.int32),
            logprobs=np.array(beam.logprobs, dtype=np.float32),
            finish_reason="stop" if beam.ids[-1] in self._ends else "length",
            weight_spans=tuple(spans),
        )


async def run_search(search: BeamSearch, ask: Ask) -> None:
    """Until it is done. All beams are asked about at once, so that they are one batch to the engine."""
    while not search.done:
        search.advance(
            await asyncio.gather(
                *(ask(number, list(beam.ids), search.candidates) for number, beam in enumerate(search.live))
            )
        )
