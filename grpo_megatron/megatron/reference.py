"""Reference weights on the ranks of the actor, exchanged in place."""

from contextlib import contextmanager

import torch

from grpo_megatron.megatron.weights import local_parameters, local_weights


class ReferenceWeights:
    """A second set of values for the parameters of a model.

    Parameters are never rebound: the optimizer holds the tensors (with the distributed optimizer,
    views of one buffer), and one that points elsewhere would silently stop being trained.
    """

    @torch.no_grad()
    def __init__(self, chunks, on_host: bool = True, same_model: bool = True):
        """Takes the current values of the model's chunks as the reference.

        on_host: kept in the host's memory between uses, else beside the parameters. same_model: frozen parameters are alike in
        both, and not held twice: with adapters, the reference is the model with their first values, which change nothing.
        """
        self._on_host = on_host
        adapters = local_parameters(chunks, adapters=True)
        held = adapters if adapters and same_model else local_weights(chunks) | adapters
        self._parameters = list(held.values())
        self._other = [self._copy(parameter) for parameter in self._parameters]

    def _copy(self, parameter: torch.Tensor) -> torch.Tensor:
        return parameter.detach().to("cpu" if self._on_host else parameter.device, copy=True)

    @torch.no_grad()
    def take_current(self) -> None:
        """The parameters' present values become the reference."""
        for parameter, other in zip(self._parameters, self._other, strict=True):
            other.copy_(parameter)

    @torch.no_grad()
    def _exchange(self) -> None:
        for parameter, other in zip(self._parameters, self._other, strict=True):
            held = self._copy(parameter)
            parameter.copy_(other)
            other.copy_(held)

    def value_of(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        """The reference's value of one parameter, on the parameter's device."""
        index = next((i for i, own in enumerate(self._parameters) if own is parameter), None)
        return parameter.detach() if index is None else self._other[index].to(parameter.device)

    @contextmanager
    def in_place(self):
        """Within this context the model computes with the reference weights."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()
