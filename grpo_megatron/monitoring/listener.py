"""Who is told what a run measures."""

from typing import Protocol

import numpy as np


class Listener(Protocol):
    """Told by the monitor, in the order of the steps; a resumed run tells the steps after its checkpoint again.

    A method may raise whatever its medium raises: the monitor says so once, and the run goes on.
    """

    def scalars(self, step: int, values: dict[str, float]) -> None: ...

    def histogram(self, step: int, name: str, values: np.ndarray) -> None:
        """values: numbers [n], n > 0, of which a distribution is to be shown."""
        ...

    def text(self, step: int, name: str, text: str) -> None:
        """text: to be shown as it is. It holds what a model wrote, so nothing in it may be taken for markup."""
        ...

    def close(self) -> None: ...
