"""The arrays of a sample, and the handles by which processes pass them on without copying them.

A sample in the driver has only a handle. Its arrays stay where they were made, until the trainer's ranks
fetch them.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np


class Handle(Protocol):
    """Interface of a reference to a value that may be in another process or in a file.

    The value is, for example, the arrays or the texts of a sample. `values_of` returns the values of handles.
    Processes send each other handles, because the values are large.
    """

    @classmethod
    def get(cls, handles: Sequence["Handle"]) -> list[Any]:
        """Return the values of some handles of this class, in order. All of them are fetched at once."""


@dataclass(frozen=True)
class RoutingParts:
    """The routing of one sequence, divided into one part per pipeline stage.

    The routing is the experts that the engine chose for each token. A rank fetches only its stage's part.
    """

    layers: tuple[tuple[int, ...], ...]
    """The layers of each pipeline stage, as indices among the L layers with experts."""
    parts: tuple[Handle, ...]
    """Handle of each stage's part of the routing, an array int [P + R, layers of the stage, k]."""


@dataclass(frozen=True)
class SampleArrays:
    """The arrays of one sequence: P prompt tokens, and R > 0 response tokens.

    The constructor raises ValueError if an array has a wrong length.
    """

    prompt_ids: np.ndarray
    """int32 [P]. Tokens that the model read before its first turn in this sequence."""
    response_ids: np.ndarray
    """int32 [R]. Tokens after the prompt, written by the model or by the environment."""
    loss_mask: np.ndarray
    """bool [R]. False for tokens that are not trained on, such as text that the model did not write."""
    rollout_logprobs: np.ndarray
    """float32 [R]. Natural log of the probability with which each token was sampled, after temperature."""
    routing: np.ndarray | RoutingParts | None = None
    """int [P + R, L, k]. The k experts that the engine chose for each token in each of the L layers with
    experts. None: not recorded."""

    def __post_init__(self):
        length, tokens = len(self.response_ids), len(self.prompt_ids) + len(self.response_ids)
        if length == 0:
            raise ValueError("the response has no tokens")
        if len(self.loss_mask) != length or len(self.rollout_logprobs) != length:
            raise ValueError(
                f"{length} response tokens, but {len(self.loss_mask)} mask values and "
                f"{len(self.rollout_logprobs)} log-probs"
            )
        if isinstance(self.routing, np.ndarray) and len(self.routing) != tokens:
            raise ValueError(f"{tokens} tokens, but routing for {len(self.routing)}")


@dataclass(frozen=True)
class Texts:
    """The texts of one sequence.

    response: the response as text
    scored: the part of the response that reward.function scored, such as an episode's last turn; None: the
        whole response
    """

    response: str = ""
    scored: str | None = None


@dataclass(frozen=True)
class Here:
    """Handle that contains its value. The value travels with the handle to other processes."""

    value: Any

    @classmethod
    def get(cls, handles: Sequence["Here"]) -> list[Any]:
        return [handle.value for handle in handles]


def values_of(handles: Sequence[Handle]) -> list[Any]:
    """Return the values of some handles, in order. Values outside this process are fetched, all at once.

    handles: handles of any classes.
    """
    of_class: dict[type, list[Handle]] = {}
    for handle in handles:
        of_class.setdefault(type(handle), []).append(handle)
    found = {kind: iter(kind.get(own)) for kind, own in of_class.items()}
    return [next(found[type(handle)]) for handle in handles]


_reading_is_allowed = True


@contextmanager
def reading_forbidden() -> Iterator[None]:
    """Make the function `read` raise RuntimeError in this process, inside the `with` block.

    `read` fetches the arrays of samples (tokens and log-probs). The driver must not do this while a run
    trains, because one process would take longer to read the tokens of thousands of GPUs than the GPUs take
    to compute. `values_of` still works, for example to fetch texts.
    """
    global _reading_is_allowed
    before, _reading_is_allowed = _reading_is_allowed, False
    try:
        yield
    finally:
        _reading_is_allowed = before


def read(handles: Sequence[Handle]) -> list[SampleArrays]:
    """Return the arrays of samples, given their handles. Arrays outside this process are fetched.

    Raises RuntimeError inside a `with reading_forbidden()` block, as in the driver while a run trains.
    """
    if not _reading_is_allowed:
        raise RuntimeError("the driver must not read the arrays of a sample while the run trains")
    return values_of(handles)


def with_routing_here(samples: Sequence[SampleArrays], stage: int | None = None) -> list[SampleArrays]:
    """Fetch the routing of samples that have only handles of it. Return copies with routing arrays.

    Such samples have RoutingParts: one handle for each pipeline stage's part of the routing. All parts are
    fetched at once. Other samples are returned unchanged, with the routing of all layers.

    stage: pipeline stage whose part to fetch. None: all parts, joined with the layers in increasing order.
    """
    stages = slice(stage, None if stage is None else stage + 1)
    divided = [own.routing for own in samples if isinstance(own.routing, RoutingParts)]
    parts = iter(values_of([part for routing in divided for part in routing.parts[stages]]))
    return [
        replace(own, routing=_joined(own.routing.layers[stages], parts))
        if isinstance(own.routing, RoutingParts)
        else own
        for own in samples
    ]


def _joined(layers: Sequence[tuple[int, ...]], parts: Iterator[np.ndarray]) -> np.ndarray:
    """Join the parts of one sequence's routing. Return int [P + R, all layers, k], with layers in order.

    layers: the layers of each part.
    parts: iterator of routing arrays, int [P + R, layers of the part, k]. One array is taken for each part.
    """
    own = [next(parts) for _ in layers]
    if len(own) == 1:
        return own[0]
    return np.concatenate(own, axis=1)[:, np.argsort(np.concatenate(layers).astype(int))]
