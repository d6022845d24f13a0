"""The engine's side of a weight sync. It runs in SGLang's scheduler processes, one per tensor-parallel rank.

SGLang calls `obey` as a custom weight loader, with the rank's own fused and sharded parameters. The scheduler
does nothing else while `obey` runs.
"""

import pickle
import traceback

import torch

from grpo_megatron.weights.sync.order import Answer, Order, Task
from grpo_megatron.weights.sync.plan import EngineRank
from grpo_megatron.weights.sync.receiver import Receiver

# The path by which SGLang imports the function.
DOOR = "grpo_megatron.sglang.weight_door.obey"
_RECEIVER = "_grpo_weight_receiver"
# Parameters of an attention layer that are not weights of the model.
KV_SCALES = ("k_scale", "v_scale")


def answer_key(order: Order, rank: int) -> str:
    return f"answer/{order.number}/{order.engine}.{rank}"


class _Bytes:
    """Bytes that are pickled by value and unpickled as a uint8 tensor, to send them to ranks on other nodes.

    It replaces SGLang's serialisation of tensors, which refers to a file of this node.
    """

    def __init__(self, content: bytes):
        self._content = content

    def __reduce__(self):
        return torch.ByteTensor, (list(self._content),)  # a type that SGLang permits in pickles


def by_value(order: Order) -> bytes:
    """Serialise an order as named tensors, the only form in which SGLang passes data to `obey`."""
    return pickle.dumps([("order", _Bytes(pickle.dumps(order)))])


def obey(model: torch.nn.Module, named_tensors: list[tuple[str, torch.Tensor]]) -> None:
    """Carry out a weight-sync order in one rank of an engine. SGLang calls it as a custom weight loader.

    The Answer goes to the driver's key-value store, because SGLang returns nothing of a loader. Errors are
    reported in it too, because an exception would end SGLang's scheduler.

    named_tensors: one tensor, the Order serialised by `by_value`.
    """
    from sglang.srt.distributed import get_tp_group

    ((_, control),) = named_tensors
    order: Order = pickle.loads(control.cpu().numpy().tobytes())
    me = EngineRank(order.engine, get_tp_group().rank_in_group)
    try:
        answer = _carry_out(order, me, model)
    except Exception:
        answer = Answer({}, {}, error=traceback.format_exc())
    order.setup.connect().set(answer_key(order, me.rank), pickle.dumps(answer))


@torch.no_grad()
def _carry_out(order: Order, me: EngineRank, model: torch.nn.Module) -> Answer:
    parameters = {
        name: own.data for name, own in model.named_parameters() if name.rpartition(".")[2] not in KV_SCALES
    }
    if order.task == Task.describe:
        return Answer(
            {}, {}, parameters={name: (tuple(value.shape), value.dtype) for name, value in parameters.items()}
        )
    answer = _receiver(order, me, model).receive(order, parameters)
    if order.task == Task.transfer:
        reset_kv_scales(model)
        if hasattr(model, "post_load_weights"):
            # It computes weights that are derived from others. SGLang expects custom loaders to call it.
            model.post_load_weights()
    return answer


def reset_kv_scales(model: torch.nn.Module) -> None:
    """Set the scales of an FP8 KV cache to 1, because the trainer has no such scales.

    FP8 engines have these parameters for some model families, such as Llama, Qwen2 and Mixtral. Their values
    are lost when the engine releases the memory of the weights. An engine that started with load_format=dummy
    has random values.
    """
    for module in model.modules():
        for name in KV_SCALES:
            if isinstance(scale := getattr(module, name, None), torch.nn.Parameter):
                scale.data.fill_(1.0)
                # Some attention backends read this copy of the number on the host.
                setattr(module, f"{name}_float", 1.0)


def _receiver(order: Order, me: EngineRank, model: torch.nn.Module) -> Receiver:
    """Return this rank's receiver. It is kept in the model object until the order's setup changes."""
    kept: Receiver | None = model.__dict__.get(_RECEIVER)
    if kept is None or kept.setup != order.setup:
        if kept is not None:
            kept.close()
        kept = model.__dict__[_RECEIVER] = Receiver(order.setup, me, next(model.parameters()).device)
    return kept
