"""Reference weights on the ranks of the actor, exchanged in place."""

from contextlib import contextmanager

import torch


class ReferenceWeights:
    """A second set of values for the parameters of a model, kept on the host between uses.

    Parameters are never rebound: the optimizer holds the tensors (with the distributed optimizer,
    views of one buffer), and one that points elsewhere would silently stop being trained.
    """

    @torch.no_grad()
    def __init__(self, model):
        """Takes the model's current values as the reference."""
        self._parameters = list(model.parameters())
        self._other = [parameter.detach().to("cpu", copy=True) for parameter in self._parameters]

    @torch.no_grad()
    def _exchange(self) -> None:
        for parameter, other in zip(self._parameters, self._other, strict=True):
            held = parameter.detach().to("cpu", copy=True)
            parameter.copy_(other)
            other.copy_(held)

    @contextmanager
    def in_place(self):
        """Within this context the model computes with the reference weights."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()
