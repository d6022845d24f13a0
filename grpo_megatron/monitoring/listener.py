"""Interface of the objects that receive what a run measures, such as TensorBoard."""

from typing import Protocol

import numpy as np


class Listener(Protocol):
    """Receiver of what a run measures, such as TensorBoard. The monitor calls it in the order of the steps.

    A resumed run reports the steps after its checkpoint again. A method may raise any exception: the monitor
    shows the first exception of each class of listeners, and the run goes on.
    """

    def scalars(self, step: int, values: dict[str, float]) -> None: ...

    def histogram(self, step: int, name: str, values: np.ndarray) -> None:
        """Record the distribution of the numbers `values` [n], n > 0, under this name."""
        ...

    def text(self, step: int, name: str, text: str) -> None:
        """Record a text that is shown unchanged.

        It may contain what a model wrote, so nothing in it may be interpreted as markup.
        """
        ...

    def close(self) -> None: ...
