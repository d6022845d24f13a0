"""Rounding noise: random rounding errors, to measure how far log-probs move if only rounding differs.

A difference between engine and trainer that is much larger than this movement is an error, not rounding.
"""

from contextlib import contextmanager

import torch


@contextmanager
def rounding_noise(chunks: list[torch.nn.Module], dtype: torch.dtype):
    """Add random errors to every layer's output inside the `with` block, as large as a rounding to `dtype`.

    Rounding to the nearest number changes a value by up to eps / 2 of the value, with eps =
    torch.finfo(dtype).eps. So outputs are multiplied by 1 + u, with u uniform in [-eps / 2, eps / 2]. Layers
    are the modules without children. Integer outputs do not change. The errors are the same in each call.

    chunks: modules in which all layers get errors.
    """
    generators: dict[torch.device, torch.Generator] = {}
    half = torch.finfo(dtype).eps / 2

    def noisy(tensor):
        if not torch.is_tensor(tensor) or not tensor.is_floating_point():
            return tensor
        if tensor.device not in generators:
            generators[tensor.device] = torch.Generator(tensor.device).manual_seed(0)
        # Computed in float64, where 1 + u is not rounded itself.
        u = torch.rand(
            tensor.shape, generator=generators[tensor.device], device=tensor.device, dtype=torch.float64
        )
        return (tensor.double() * (1 + (2 * u - 1) * half)).to(tensor.dtype)

    def add(module, inputs, output):
        return type(output)(map(noisy, output)) if type(output) in (tuple, list) else noisy(output)

    layers = [module for chunk in chunks for module in chunk.modules() if not any(module.children())]
    hooks = [layer.register_forward_hook(add) for layer in layers]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
