"""Interface of the objects that receive what a run measures, such as TensorBoard."""

from typing import Protocol

import numpy as np


class Listener(Protocol):
    """Interface of objects that receive a run's metrics and texts, such as TensorBoard.

    The monitor (monitoring.monitor) calls the methods in the order of the steps. A resumed run repeats the
    steps after its checkpoint, so a step may come twice. A method may raise any Exception: the monitor shows
    the first exception of each class of listeners, and the run goes on.
    """

    def scalars(self, step: int, values: dict[str, float]) -> None: ...

    def histogram(self, step: int, name: str, values: np.ndarray) -> None:
        """Record the distribution of `values`, a non-empty one-dimensional array, under this name."""
        ...

    def text(self, step: int, name: str, text: str) -> None:
        """Record a text under this name, to be shown without any change.

        The text may quote a model's output, so no part of the text may be interpreted as markup.
        """
        ...

    def close(self) -> None: ...
