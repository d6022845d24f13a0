"""The arrays of a sample, and the handles by which processes pass them on without copying them.

A sample in the driver has only a handle. Its arrays stay where they were made, until the trainer's ranks
fetch them.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np


@dataclass(frozen=True)
class SampleArrays:
    """The arrays of one sequence: P prompt tokens, and R > 0 response tokens."""

    prompt_ids: np.ndarray
    """int32 [P]. Tokens that the model read before its first turn in this sequence."""
    response_ids: np.ndarray
    """int32 [R]. Tokens after the prompt, written by the model or by the environment."""
    loss_mask: np.ndarray
    """bool [R]. False for tokens that are not trained on, such as text that the model did not write."""
    rollout_logprobs: np.ndarray
    """float32 [R]. Natural log of the probability with which each token was sampled, after temperature."""
    routing: np.ndarray | None = None
    """int [P + R, L, k] or None. The k experts that the engine chose for each token in each of L layers."""

    def __post_init__(self):
        length, tokens = len(self.response_ids), len(self.prompt_ids) + len(self.response_ids)
        if length == 0:
            raise ValueError("the response has no token")
        if len(self.loss_mask) != length or len(self.rollout_logprobs) != length:
            raise ValueError(
                f"{length} response tokens, but {len(self.loss_mask)} mask values and "
                f"{len(self.rollout_logprobs)} log-probs"
            )
        if self.routing is not None and len(self.routing) != tokens:
            raise ValueError(f"{tokens} tokens, but routing for {len(self.routing)}")


@dataclass(frozen=True)
class Texts:
    """The texts of one sequence.

    response: the response as text
    scored: the part of it that reward.function scored, such as an episode's last turn; None: the whole text
    """

    response: str = ""
    scored: str | None = None


class Handle(Protocol):
    """Interface of an object that knows where a value is, such as the arrays or the texts of a sample."""

    @classmethod
    def get(cls, handles: Sequence["Handle"]) -> list[Any]:
        """Return the values of handles of this class. Fetch those that are elsewhere, all at once."""


@dataclass(frozen=True)
class Here:
    """Handle of a value in this process. It carries the value along when it is sent to another process."""

    value: Any

    @classmethod
    def get(cls, handles: Sequence["Here"]) -> list[Any]:
        return [handle.value for handle in handles]


def values_of(handles: Sequence[Handle]) -> list[Any]:
    """Return the values of some handles, in order. Fetch those that are elsewhere, all at once."""
    of_class: dict[type, list[Handle]] = {}
    for handle in handles:
        of_class.setdefault(type(handle), []).append(handle)
    found = {kind: iter(kind.get(own)) for kind, own in of_class.items()}
    return [next(found[type(handle)]) for handle in handles]


_reading_is_allowed = True


@contextmanager
def reading_forbidden() -> Iterator[None]:
    """Forbid `read` in this process, inside the `with` block.

    The driver forbids it while a run trains. A driver that touched the tokens of thousands of GPUs would take
    longer than the GPUs.
    """
    global _reading_is_allowed
    before, _reading_is_allowed = _reading_is_allowed, False
    try:
        yield
    finally:
        _reading_is_allowed = before


def read(handles: Sequence[Handle]) -> list[SampleArrays]:
    """Return the arrays of samples, given their handles. Raises RuntimeError inside `reading_forbidden`."""
    if not _reading_is_allowed:
        raise RuntimeError("the driver must not read the arrays of a sample while the run trains")
    return values_of(handles)
