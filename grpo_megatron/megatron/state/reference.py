"""Reference weights on the ranks of the policy. To compute with them, they are swapped with the policy's."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from grpo_megatron.batch.layout import padded_to
from grpo_megatron.megatron.memory.host import host_memory
from grpo_megatron.megatron.state.hf_weights import local_parameters, local_weights

# Bytes that are swapped at a time, by kind of device. With much smaller pieces a GPU would spend longer on
# starting copies than on copying. On a CPU a piece should stay in a core's cache between two copies.
_PIECE = {"cuda": 64 << 20, "cpu": 1 << 20}
# Every parameter starts at a multiple of this many bytes in the reference's memory, whatever its dtype.
_ALIGNMENT = 256


class ReferenceWeights:
    """Weights of the reference model: a second set of values for the policy's parameters.

    To compute with the reference model, `in_place` swaps the two sets of values. The parameters stay the same
    tensor objects, because the optimizer refers to these objects. With other objects in their place, training
    would silently no longer change the model.
    """

    def __init__(self, chunks, on_host: bool = True, same_model: bool = True):
        """Store a copy of the current values of the model's parameters as the reference weights.

        chunks: model chunks of this rank.
        on_host: if True, keep the copy in host memory, otherwise in device memory.
        same_model: True if policy and reference start from the same checkpoint. If the model has LoRA
            adapters, only the adapters' values are then stored, because the frozen parameters are equal in
            both models.
        """
        adapters = local_parameters(chunks, adapters=True)
        held = adapters if adapters and same_model else local_weights(chunks) | adapters
        self._parameters = list(held.values())
        self._indices = {id(parameter): index for index, parameter in enumerate(self._parameters)}
        sizes = [padded_to(parameter.nbytes, _ALIGNMENT) for parameter in self._parameters]
        device = self._parameters[0].device
        memory = (
            host_memory(sum(sizes)) if on_host else torch.empty(sum(sizes), dtype=torch.uint8, device=device)
        )
        parts = zip(memory.split(sizes), self._parameters, strict=True)
        self._others = [part[: parameter.nbytes] for part, parameter in parts]
        self.is_initial = True  # a checkpoint need not hold these weights: they can be loaded again
        self._take()

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the reference weights take."""
        return sum(other.nbytes for other in self._others)

    def _pieces(self, size: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield (policy's bytes, reference's bytes) of all parameters, in pieces of at most `size` bytes.

        The two items are uint8 views of the same elements: of the parameter, and of its stored reference
        value.
        """
        for parameter, other in zip(self._parameters, self._others, strict=True):
            own = parameter.detach().view(-1).view(torch.uint8)
            yield from zip(own.split(size), other.split(size), strict=True)

    def take_current(self) -> None:
        """Replace the reference weights by a copy of the parameters' current values.

        From then on checkpoints contain the reference weights, because no HF checkpoint has them.
        """
        self._take()
        self.is_initial = False

    @torch.no_grad()
    def _take(self) -> None:
        for own, other in self._pieces(_PIECE["cuda"]):
            other.copy_(own, non_blocking=True)

    @torch.no_grad()
    def _exchange(self) -> None:
        """Swap the values in the model's parameters with the stored values, piece by piece.

        This swaps the reference's weights in, or the policy's weights back. With CUDA the method returns
        before the copies are done, and later work on the current stream waits for them. Copies to and from
        the device overlap: while one piece is copied to the host, the next piece is copied to the device.
        """
        device = self._parameters[0].device
        backend = torch.get_device_module(device)  # torch.cpu also has streams; they do nothing
        current, inward, outward = backend.current_stream(), backend.Stream(), backend.Stream()
        inward.wait_stream(current)
        size = _PIECE[device.type]
        staging = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2)]
        emptied = [None, None]
        for index, (own, other) in enumerate(self._pieces(size)):
            slot = index % 2
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
        """Return the stored reference value of a parameter, without copying it from where it is stored.

        Returns None if policy and reference share the value, so that none is stored (frozen parameters of a
        model with adapters). Do not call this within `in_place`, where the stored values are the policy's.
        """
        index = self._indices.get(id(parameter))
        return None if index is None else self._others[index].view(parameter.dtype).view(parameter.shape)

    def value_of(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        """Return the reference's value of a parameter, on the parameter's device.

        If policy and reference share the value, so that none is stored, the parameter's own value is
        returned.
        """
        value = self.held_value(parameter)
        return parameter.detach() if value is None else value.to(parameter.device, non_blocking=True)

    @contextmanager
    def in_place(self):
        """Swap the reference weights into the model, and the policy's back at the end of the `with` block."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()
