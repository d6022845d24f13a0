"""SGLang's LoRA adapters without a GPU, on its backend `torch_native`.

SGLang allocates small tensors of its LoRA layers in pinned memory, which PyTorch refuses without a GPU. Here
it gets plain memory instead. Written for SGLang 0.5.23. Imported only in SGLang's own processes.
"""

from types import SimpleNamespace

import torch
from sglang.srt.lora import layers
from sglang.srt.lora.backend import torch_backend


def register() -> None:
    """Let SGLang's LoRA layers and their backend work without pinned memory in this process, from now on."""
    torch.Tensor.pin_memory = lambda tensor, device=None: tensor
    plain = {name: _without_pinning(getattr(torch, name)) for name in ("tensor", "zeros")}
    layers.torch = torch_backend.torch = SimpleNamespace(**{**vars(torch), **plain})


def _without_pinning(create):
    return lambda *args, pin_memory=False, **kwargs: create(*args, **kwargs)
