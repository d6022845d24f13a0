"""Beam search: finds the same K sequences as transformers' generate(num_beams=K, num_return_sequences=K).

The rules are those of transformers 5.19 (GenerationMixin._beam_search). Each step asks the engine for one
more token of every live beam, together with the most likely tokens at that position. The engine's prefix
cache avoids repeated computation. SGLang 0.5.23 has its own beam search, but it ends by other rules and
returns no log-probs of tokens. SGLang 0.5.17 has none.
"""

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from grpo_megatron.batch.sample import WeightSpan
from grpo_megatron.cluster.concurrency import together
from grpo_megatron.config.rollout import BeamConfig, EarlyStopping
from grpo_megatron.sglang.request import Completion

# Function that asks the engine for one more token of a beam. Its arguments: index of the beam among the
# unfinished ones, the beam's tokens so far, and how many of the most likely next tokens to return.
Ask = Callable[[int, list[int], int], Awaitable[Completion]]


@dataclass(frozen=True)
class Beam:
    """A response under construction. A beam search extends several of them, token by token."""

    ids: tuple[int, ...] = ()
    """Token ids of the response so far, without the prompt."""
    logprobs: tuple[float, ...] = ()
    """Log-prob of each token in `ids`."""
    versions: tuple[int, ...] = ()
    """Version of the weights that generated each token in `ids`."""
    total: float = 0.0
    """Sum of the log-probs."""

    def then(self, token: int, logprob: float, version: int) -> "Beam":
        """Return a copy of this beam with one more token, which the weights of `version` generated."""
        return Beam(
            (*self.ids, token), (*self.logprobs, logprob), (*self.versions, version), self.total + logprob
        )


class BeamSearch:
    """The state of a beam search for the responses to one prompt. `run_search` asks the engine on its behalf.

    While `done` is False, `run_search` asks the engine for the most likely next tokens of each unfinished
    beam (those in `live`), and passes the answers to `advance`. When `done` is True, `completions` returns
    the responses.
    """

    def __init__(self, width: int, ends: Iterable[int], limit: int, config: BeamConfig):
        """Begin a beam search with one empty beam.

        width: number of beams. This is also the number of responses to find.
        ends: ids of the tokens that end a response.
        limit: maximum number of tokens of a response.
        config: length penalty and stopping rule of the search.
        """
        self._width, self._ends, self._limit, self._config = width, frozenset(ends), limit, config
        # Enough candidates that `width` beams can continue, whichever candidates end.
        self.candidates = max(2, 1 + len(self._ends)) * width
        self.live = [Beam()]
        self.finished: list[tuple[float, Beam]] = []  # (score, beam), the best first
        self.done = False

    def advance(self, answers: list[Completion]) -> None:
        """Make one step of the beam search: replace the unfinished beams by beams that are one token longer.

        The unfinished beams are in the attribute `live`. The best beams that have ended are in `finished`.
        `done` becomes True if the search is over.

        answers: for each beam in `live`, in this order, the engine's answer with the `self.candidates` most
            likely next tokens.
        """
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
                # Candidates after the first `width` only ensure that enough beams continue. They do not count
                # if they end.
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
        """Return True if an unfinished beam may still become one of the responses that the search returns.

        length: number of tokens of each unfinished beam.
        """
        stopping = self._config.early_stopping
        if len(self.finished) < self._width:
            return True
        if stopping == EarlyStopping.complete:
            return False
        if stopping == EarlyStopping.never and self._config.length_penalty > 0:
            length = self._limit
        return self._score(self.live[0].total, length) > self.finished[-1][0]

    def completions(self, group: int) -> list[Completion]:
        """Return the finished responses, the best first, in the form of an engine's answers.

        group: GroupRequest.key of the prompt. The key of each Completion is (group, index in the list).
        """
        return [self._completion(beam, (group, index)) for index, (_, beam) in enumerate(self.finished)]

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
    """Run a beam search to its end. Afterwards `search.completions` returns the responses.

    ask: async function that asks the engine for the next token of one beam. Its arguments are the index of
        the beam among the unfinished ones, the beam's token ids, and how many of the most likely next tokens
        to return. It is called for all unfinished beams at once, so that the engine batches the requests.
    """
    while not search.done:
        search.advance(
            await together(
                ask(index, list(beam.ids), search.candidates) for index, beam in enumerate(search.live)
            )
        )
