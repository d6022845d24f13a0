"""Reference weights on the ranks of the actor, exchanged in place."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from grpo_megatron.batch.layout import padded_to
from grpo_megatron.megatron.host_memory import host_memory
from grpo_megatron.megatron.weights import local_parameters, local_weights

# Bytes that are exchanged at a time, by kind of device. With much less, starting copies would take a GPU longer than making
# them; on a CPU they should stay in a core's cache between two copies.
_PIECE = {"cuda": 64 << 20, "cpu": 1 << 20}
# Every parameter begins at a multiple of this in the reference's memory, whatever its dtype.
_ALIGNMENT = 256


class ReferenceWeights:
    """A second set of values for the parameters of a model.

    Parameters are never rebound: the optimizer holds the tensors (with the distributed optimizer,
    views of one buffer), and one that points elsewhere would silently stop being trained.
    """

    def __init__(self, chunks, on_host: bool = True, same_model: bool = True):
        """Takes the current values of the model's chunks as the reference.

        on_host: kept in the host's memory between uses, else beside the parameters. same_model: frozen parameters are alike in
        both, and not held twice: with adapters, the reference is the model with their first values, which change nothing.
        """
        adapters = local_parameters(chunks, adapters=True)
        held = adapters if adapters and same_model else local_weights(chunks) | adapters
        self._parameters = list(held.values())
        sizes = [padded_to(parameter.nbytes, _ALIGNMENT) for parameter in self._parameters]
        device = self._parameters[0].device
        memory = (
            host_memory(sum(sizes)) if on_host else torch.empty(sum(sizes), dtype=torch.uint8, device=device)
        )
        parts = zip(memory.split(sizes), self._parameters, strict=True)
        self._others = [part[: parameter.nbytes] for part, parameter in parts]
        self.is_initial = True  # the model's first weights, which no checkpoint need hold
        self._take()

    @property
    def nbytes(self) -> int:
        """Bytes of the second set of values."""
        return sum(other.nbytes for other in self._others)

    def _pieces(self, size: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """(the model's, the reference's): the same bytes of both, uint8, at most `size` long."""
        for parameter, other in zip(self._parameters, self._others, strict=True):
            own = parameter.detach().view(-1).view(torch.uint8)
            yield from zip(own.split(size), other.split(size), strict=True)

    def take_current(self) -> None:
        """The parameters' present values become the reference."""
        self._take()
        self.is_initial = False

    @torch.no_grad()
    def _take(self) -> None:
        for own, other in self._pieces(_PIECE["cuda"]):
            other.copy_(own, non_blocking=True)

    @torch.no_grad()
    def _exchange(self) -> None:
        """Swap both sets of values. With CUDA it returns at once: later work on the device waits for it, the host does not.

        Each byte crosses the link once in each direction, and both directions are busy at a time: while a piece of the model is
        on its way out, the reference's next one is on its way in.
        """
        device = self._parameters[0].device
        backend = torch.get_device_module(device)  # torch.cpu has streams too, which do nothing
        current, inward, outward = backend.current_stream(), backend.Stream(), backend.Stream()
        inward.wait_stream(current)
        size = _PIECE[device.type]
        staging = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2)]
        emptied = [None, None]
        for number, (own, other) in enumerate(self._pieces(size)):
            slot = number % 2
            held = staging[slot][: len(own)]
            with backend.stream(inward):
                if emptied[slot] is not None:
                    inward.wait_event(emptied[slot])
                held.copy_(own)
                own.copy_(other, non_blocking=True)
                arrived = inward.record_event()
            with backend.stream(outward):
                outward.wait_event(arrived)
                other.copy_(held, non_blocking=True)
                emptied[slot] = outward.record_event()
        current.wait_stream(inward)
        current.wait_stream(outward)

    def held_value(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """The reference's value of one parameter where it is kept; None of one that is the same in both."""
        index = next((i for i, own in enumerate(self._parameters) if own is parameter), None)
        return None if index is None else self._others[index].view(parameter.dtype).view(parameter.shape)

    def value_of(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        """The reference's value of one parameter, on the parameter's device."""
        value = self.held_value(parameter)
        return parameter.detach() if value is None else value.to(parameter.device, non_blocking=True)

    @contextmanager
    def in_place(self):
        """Within this context the model computes with the reference weights."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()
