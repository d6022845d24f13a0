"""Functions that SGLang calls in an engine's scheduler process instead of loading weights."""

import json


def describe(model, named_tensors):
    """Load another model into this engine's ranks, and write {parameter: shape} of this TP rank to a file.

    The only tensor holds JSON: {"model": folder of the other model, "path": the file, without the rank}.
    """
    import torch
    from sglang.srt.configs.device_config import DeviceConfig
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.distributed import get_tp_group
    from sglang.srt.model_loader import get_model
    from sglang.srt.runtime_context import get_server_args

    from grpo_megatron.sglang.weight_receiver import own_weights

    ((_, request),) = named_tensors
    asked = json.loads(bytes(request.tolist()))
    # Threads load DeepSeek-V3. Inference mode, in which the scheduler calls this, does not hold in them.
    with torch.inference_mode(False), torch.no_grad():
        other = get_model(
            model_config=ModelConfig.from_server_args(get_server_args(), model_path=asked["model"]),
            load_config=LoadConfig(),
            device_config=DeviceConfig("cpu"),
        )
    shapes = {name: list(parameter.shape) for name, parameter in own_weights(other).items()}
    with open(f"{asked['path']}.{get_tp_group().rank_in_group}", "w", encoding="utf-8") as file:
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
