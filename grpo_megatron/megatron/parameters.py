"""Small operations on the parameters of a module."""

import torch


@torch.no_grad()
def scale_parameters(module: torch.nn.Module, factor: float, share: float = 1.0) -> None:
    """Multiply every parameter by `factor` in place.

    share: fraction of the elements to multiply, chosen at random.
    """
    for parameter in module.parameters():
        if share == 1.0:
            parameter.mul_(factor)
        else:
            parameter.mul_(torch.where(torch.rand_like(parameter) < share, factor, 1.0))


def names_of_broken(module: torch.nn.Module) -> list[str]:
    """Return the names of parameters that contain NaN or infinity."""
    return [name for name, parameter in module.named_parameters() if not parameter.isfinite().all()]
