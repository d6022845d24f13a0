"""TrainingMemory measures the device memory of model and optimizer on a rank, and frees it for a while."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from grpo_megatron.megatron.memory.parking import Parking

# {name: bytes}
Bytes = dict[str, int]


def unique_storages(tensors) -> dict[int, torch.UntypedStorage]:
    """Return the storages of the tensors, {address: storage}. Tensors that share a storage give one item.

    tensors: iterable of tensors. None and empty tensors are left out.
    """
    storages = (tensor.untyped_storage() for tensor in tensors if tensor is not None)
    return {storage.data_ptr(): storage for storage in storages if storage.nbytes()}


class TrainingMemory:
    """Measures the device memory of a DDP-wrapped model and its optimizer, and frees it for a while.

    `sleep` frees the memory for rollout engines. If the optimizer is offloaded, its states are on the device
    only within `optimizer_at_hand`. The first optimizer step creates some of the tensors, so methods look up
    the tensors at each call.

    Kinds of memory:

    - parameters: the weights.
    - gradients: DDP's gradient buffers.
    - optimizer: Adam's moments, and the master weights if they are not the weights themselves.
    - fp8_casts: FP8 copies of the weights, which TransformerEngine keeps from one micro-batch to the next.
    """

    def __init__(self, ddp: list, optimizer, offload_optimizer: bool, folder: str | None):
        """Register a model and its optimizer. If the optimizer is offloaded, free the memory of its states.

        ddp: DDP-wrapped model chunks.
        optimizer: Optimizer of these chunks.
        offload_optimizer: if True, the optimizer's states are in device memory only within
            `optimizer_at_hand`.
        folder: folder for the contents of freed memory. None: host memory (without CUDA, a temporary folder).
        """
        self._ddp, self._optimizer, self._offload = ddp, optimizer, offload_optimizer
        self._parking = Parking(folder)
        self._park_optimizer()

    def _buffers(self) -> Iterator:
        for ddp in self._ddp:
            yield from ddp.buffers
            yield from ddp.expert_parallel_buffers

    def parameters(self) -> dict[int, torch.UntypedStorage]:
        return unique_storages(parameter.data for ddp in self._ddp for parameter in ddp.parameters())

    def gradients(self) -> dict[int, torch.UntypedStorage]:
        return unique_storages(buffer.grad_data for buffer in self._buffers())

    def optimizer(self) -> dict[int, torch.UntypedStorage]:
        tensors = []
        for part in self._optimizer.parts():
            for group in part.optimizer.param_groups:
                tensors += [parameter.data for parameter in group["params"]]
            for state in part.optimizer.state.values():
                tensors += [value for value in state.values() if torch.is_tensor(value)]
        weights = self.parameters()
        return {
            address: storage
            for address, storage in unique_storages(tensors).items()
            if address not in weights
        }

    def _casts(self) -> Iterator[dict]:
        for ddp in self._ddp:
            for module in ddp.modules():
                yield getattr(module, "_fp8_workspaces", {})

    def fp8_casts(self) -> dict[int, torch.UntypedStorage]:
        quantized = (cast for casts in self._casts() for cast in casts.values())
        return unique_storages(
            part for cast in quantized for part in vars(cast).values() if torch.is_tensor(part)
        )

    def drop_caches(self) -> None:
        """Free caches of torch and TransformerEngine, which the next micro-batch creates again.

        The caches are the FP8 copies of the weights, TransformerEngine's placeholders of weight gradients
        (one for each shape of a weight), and the workspaces of torch's matrix products.
        """
        for casts in self._casts():
            casts.clear()
        if layers := sys.modules.get("transformer_engine.pytorch.module.base"):
            layers._dummy_wgrads.clear()
        if torch.cuda.is_initialized():
            torch._C._cuda_clearCublasWorkspaces()

    def resident(self) -> Bytes:
        """Return the bytes of each kind of training memory that are on the device now, {kind: bytes}.

        The kinds are "parameters", "gradients", "optimizer" (its states) and "fp8_casts" (FP8 copies of
        weights).
        """
        kinds = {
            "parameters": self.parameters(),
            "gradients": self.gradients(),
            "optimizer": self.optimizer(),
            "fp8_casts": self.fp8_casts(),
        }
        return {
            name: sum(storage.nbytes() for storage in storages.values()) for name, storages in kinds.items()
        }

    @contextmanager
    def optimizer_at_hand(self):
        """Bring an offloaded optimizer's states into device memory for the duration of the `with` block.

        An optimizer step and the start of a checkpoint need this. If the optimizer is not offloaded, nothing
        happens.
        """
        self._parking.unpark("optimizer")
        try:
            yield
        finally:
            self._park_optimizer()

    def _park_optimizer(self) -> None:
        if self._offload:
            self._parking.park("optimizer", self.optimizer())

    def sleep(self) -> None:
        """Free the device memory of weights, gradients and optimizer states until `wake`.

        The contents of weights and optimizer states are saved, and `wake` restores them. Gradients are not
        saved, and `wake` sets them to zero.
        """
        if not self._parking.parked("optimizer"):
            self._parking.park("optimizer", self.optimizer())
        self._parking.park("parameters", self.parameters())
        self._parking.park("gradients", self.gradients(), keep=False)

    def wake(self) -> None:
        """Restore what `sleep` freed: gradients are zero then, all else is as before.

        The states of an offloaded optimizer stay out of device memory.
        """
        self._parking.unpark("gradients")
        self._parking.unpark("parameters")
        if not self._offload:
            self._parking.unpark("optimizer")
