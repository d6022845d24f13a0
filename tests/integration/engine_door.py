"""Runs inside an engine's scheduler process, where SGLang calls it in place of loading weights."""

import json


def describe(model, named_tensors):
    """Write {parameter: shape} of this TP rank to the file whose name the only tensor holds, with the rank behind it."""
    from sglang.srt.distributed import get_tp_group

    ((_, path),) = named_tensors
    shapes = {name: list(parameter.shape) for name, parameter in model.named_parameters()}
    with open(
        f"{bytes(path.tolist()).decode()}.{get_tp_group().rank_in_group}", "w", encoding="utf-8"
    ) as file:
        json.dump(shapes, file)


def parameters(model, named_tensors):
    """Write {parameter: its values} of this TP rank to a file; its name is as weight_door.by_value takes it, with the rank behind."""
    import pickle

    import torch
    from sglang.srt.distributed import get_tp_group

    ((_, name),) = named_tensors
    path = f"{pickle.loads(bytes(name.tolist()))}.{get_tp_group().rank_in_group}"
    torch.save({name: parameter.data for name, parameter in model.named_parameters()}, path)


def swap_halves(model, named_tensors):
    """Of the first dimension of parameters, whose names weight_door.by_value has taken."""
    import pickle

    import torch

    ((_, names),) = named_tensors
    for name in pickle.loads(bytes(names.tolist())):
        parameter = model.get_parameter(name)
        first, second = parameter.data.clone().chunk(2)
        parameter.data.copy_(torch.cat([second, first]))
