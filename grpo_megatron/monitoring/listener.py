"""The interface of objects that receive what a run measures."""

from typing import Protocol

import numpy as np


class Listener(Protocol):
    """Receiver of what a run measures. The monitor calls it in the order of the steps.

    A resumed run reports the steps after its checkpoint again. A method may raise whatever its medium raises:
    the monitor shows that once, and the run goes on.
    """

    def scalars(self, step: int, values: dict[str, float]) -> None: ...

    def histogram(self, step: int, name: str, values: np.ndarray) -> None:
        """Show the distribution of values [n], n > 0."""
        ...

    def text(self, step: int, name: str, text: str) -> None:
        """Show a text as it is. It holds what a model wrote, so nothing in it may be taken for markup."""
        ...

    def close(self) -> None: ...
