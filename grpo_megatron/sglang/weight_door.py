"""Runs inside an engine's scheduler process, one for each of its tensor-parallel ranks: its side of a weight sync.

SGLang calls `obey` in place of loading weights, with the rank's own fused and sharded parameters. Scheduling stands still meanwhile.
"""

import pickle
import traceback

import torch

from grpo_megatron.weights.sync.order import Answer, Order, Task
from grpo_megatron.weights.sync.plan import EngineRank
from grpo_megatron.weights.sync.receiver import Receiver

# As SGLang imports it.
DOOR = "grpo_megatron.sglang.weight_door.obey"
_RECEIVER = "_grpo_weight_receiver"
# Parameters of an attention layer that are no weights of the model.
KV_SCALES = ("k_scale", "v_scale")


def answer_key(order: Order, rank: int) -> str:
    return f"answer/{order.number}/{order.engine}.{rank}"


class _Bytes:
    """Unpickled, it is a tensor uint8: SGLang's own form of a tensor opens a file of this node, and a rank may be on another."""

    def __init__(self, content: bytes):
        self._content = content

    def __reduce__(self):
        return torch.ByteTensor, (list(self._content),)  # among what SGLang unpickles


def by_value(order: Order) -> bytes:
    """What `obey` takes as named tensors, as SGLang takes it for each rank."""
    return pickle.dumps([("order", _Bytes(pickle.dumps(order)))])


def obey(model: torch.nn.Module, named_tensors: list[tuple[str, torch.Tensor]]) -> None:
    """named_tensors: one, an Order. The Answer goes into the store: what this raised would end the scheduler."""
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
            # Computes weights that are derived from others. SGLang leaves it to whoever loads them.
            model.post_load_weights()
    return answer


def reset_kv_scales(model: torch.nn.Module) -> None:
    """Set the scales of an FP8 KV cache to 1, because the trainer's weights come without any.

    SGLang makes these parameters in engines in FP8, for some families such as Llama, Qwen2 and Mixtral. They
    lie in the memory of the weights, whose contents are lost when an engine gives it back. An engine that
    began with load_format=dummy has random ones.
    """
    for module in model.modules():
        for name in KV_SCALES:
            if isinstance(scale := getattr(module, name, None), torch.nn.Parameter):
                scale.data.fill_(1.0)
                # Some attention backends read SGLang's copy of the number on the host.
                setattr(module, f"{name}_float", 1.0)


def _receiver(order: Order, me: EngineRank, model: torch.nn.Module) -> Receiver:
    """The one of this engine's rank, which lives as long as the model and the setup."""
    kept: Receiver | None = model.__dict__.get(_RECEIVER)
    if kept is None or kept.setup != order.setup:
        if kept is not None:
            kept.close()
        kept = model.__dict__[_RECEIVER] = Receiver(order.setup, me, next(model.parameters()).device)
    return kept
