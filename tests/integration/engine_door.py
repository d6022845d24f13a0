"""Runs inside an engine's scheduler process, where SGLang calls it in place of loading weights."""

import json


def describe(model, named_tensors):
    """Write {parameter: shape} of this TP rank to the file whose name the only tensor holds, with the rank behind it."""
    from sglang.srt.distributed import get_tp_group

    ((_, path),) = named_tensors
    shapes = {name: list(parameter.shape) for name, parameter in model.named_parameters()}
    with open(f"{bytes(path.tolist()).decode()}.{get_tp_group().rank_in_group}", "w", encoding="utf-8") as file:
        json.dump(shapes, file)
