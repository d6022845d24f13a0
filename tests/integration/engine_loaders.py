"""Functions that SGLang calls in an engine's scheduler process instead of loading weights."""

import json


def describe(model, named_tensors):
    """Write {parameter: shape} of this TP rank to a file.

    The only tensor holds the file's name, to which the rank is appended.
    """
    from sglang.srt.distributed import get_tp_group

    ((_, path),) = named_tensors
    shapes = {name: list(parameter.shape) for name, parameter in model.named_parameters()}
    with open(
        f"{bytes(path.tolist()).decode()}.{get_tp_group().rank_in_group}", "w", encoding="utf-8"
    ) as file:
        json.dump(shapes, file)


def parameters(model, named_tensors):
    """Write {parameter: values} of this TP rank to a file.

    The file's name comes through as_named_tensors; the rank is appended.
    """
    import pickle

    import torch
    from sglang.srt.distributed import get_tp_group

    ((_, name),) = named_tensors
    path = f"{pickle.loads(bytes(name.tolist()))}.{get_tp_group().rank_in_group}"
    torch.save({name: parameter.data for name, parameter in model.named_parameters()}, path)


def swap_halves(model, named_tensors):
    """Swap the halves of the first dimension of parameters, whose names come through as_named_tensors."""
    import pickle

    import torch

    ((_, names),) = named_tensors
    for name in pickle.loads(bytes(names.tolist())):
        parameter = model.get_parameter(name)
        first, second = parameter.data.clone().chunk(2)
        parameter.data.copy_(torch.cat([second, first]))
