"""The engine's side of a weight sync. It runs in SGLang's scheduler processes, one per tensor-parallel rank.

SGLang calls `receive_weights` as a custom weight loader, with the rank's own fused and sharded parameters.
The scheduler does nothing else meanwhile.
"""

import pickle
import traceback

import torch

from grpo_megatron.model.adapters import A, B, Content
from grpo_megatron.model.block_scaled import BLOCK
from grpo_megatron.weights.stored import Dequantised
from grpo_megatron.weights.sync.messages import SyncCommand, SyncKind, SyncReport
from grpo_megatron.weights.sync.plan import EngineRank
from grpo_megatron.weights.sync.receiver import WeightReceiver

# The path by which SGLang imports the function.
RECEIVE_WEIGHTS = "grpo_megatron.sglang.weight_receiver.receive_weights"
_RECEIVER = "_grpo_weight_receiver"
# SGLang has buffers for this many adapters. The first slot belongs to requests without an adapter.
ADAPTER_SLOTS, _OURS = 2, 1
# Parameters of an attention layer that are not weights of the model.
KV_SCALES = ("k_scale", "v_scale")


def report_key(command: SyncCommand, rank: int) -> str:
    """Return the key under which an engine rank puts its SyncReport into the driver's key-value store.

    command: the weight-sync command that the report is about. It names the engine.
    rank: tensor-parallel rank within this engine.
    """
    return f"report/{command.sync_id}/{command.engine}.{rank}"


class _Bytes:
    """Bytes that become a uint8 tensor when they are unpickled, possibly by a rank on another node.

    SGLang's own serialisation of tensors is not used, because it refers to a file on the sender's node.
    """

    def __init__(self, content: bytes):
        self._content = content

    def __reduce__(self):
        return torch.ByteTensor, (list(self._content),)  # a type that SGLang permits in pickles


def as_named_tensors(command: SyncCommand) -> bytes:
    """Serialise a command as named tensors, because SGLang passes no other data to a custom weight loader."""
    return pickle.dumps([("command", _Bytes(pickle.dumps(command)))])


def receive_weights(model: torch.nn.Module, named_tensors: list[tuple[str, torch.Tensor]]) -> None:
    """Carry out a weight-sync command in one rank of an engine. SGLang calls this as a custom weight loader.

    The rank's SyncReport goes to the driver's key-value store, because SGLang discards what a loader returns.
    If the command fails, the report contains the traceback. No error is raised, because an error would end
    SGLang's scheduler.

    model: the rank's model, whose parameters are written.
    named_tensors: one tensor, the SyncCommand serialised by `as_named_tensors`.
    """
    from sglang.srt.distributed import get_tp_group

    ((_, serialised),) = named_tensors
    command: SyncCommand = pickle.loads(serialised.cpu().numpy().tobytes())
    me = EngineRank(command.engine, get_tp_group().rank_in_group)
    try:
        report = _carry_out(command, me, model)
    except Exception:
        report = SyncReport(error=traceback.format_exc())
    command.setup.connect().set(report_key(command, me.rank), pickle.dumps(report))


@torch.no_grad()
def _carry_out(command: SyncCommand, me: EngineRank, model: torch.nn.Module) -> SyncReport:
    content, transfer = command.setup.layouts.content, command.kind == SyncKind.transfer
    parameters = _adapter_matrices(model) if content == Content.adapter else own_weights(model)
    if content == Content.base and not command.setup.layouts.engine.fp8 and not transfer:
        # If the engine has loaded an FP8 checkpoint, the trainer has its values.
        parameters = Dequantised(parameters, (BLOCK, BLOCK))
    if command.kind == SyncKind.describe:
        return SyncReport(
            parameters={name: (tuple(value.shape), value.dtype) for name, value in parameters.items()}
        )
    report = _receiver(command, me, model).receive(command, parameters)
    if transfer and content != Content.adapter:
        reset_kv_scales(model)
        refresh_norms(model)
        clear_further_biases(model)
        if hasattr(model, "post_load_weights"):
            # It computes weights that are derived from others. SGLang expects custom loaders to call it.
            model.post_load_weights()
    return report


def own_weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return {name: this rank's part} of the weights of the engine's model, in the weight map's shapes.

    SGLang puts a layer that can have an adapter into another module, as its `base_layer`.
    """
    found = {
        name.replace(".base_layer.", "."): own.data
        for name, own in model.named_parameters()
        if name.rpartition(".")[2] not in KV_SCALES
    }
    for layer in _clamped_experts(model).values():
        for kind in ("weight", "weight_bias"):
            name = f"{layer}.w13_{kind}"
            found[name] = apart(found[name])
    return found


def apart(interleaved: torch.Tensor) -> torch.Tensor:
    """Return a view of gpt-oss's experts in which gate and up rows are apart, see InterleavedGateUp.

    interleaved: [experts, 2f, ...], in which gate rows and up rows alternate.

    Returns [experts, 2, f, ...].
    """
    return interleaved.unflatten(1, (-1, 2)).transpose(1, 2)


def _clamped_experts(model: torch.nn.Module) -> dict[torch.nn.Module, str]:
    """Return {module: name} of the experts of gpt-oss's layers; {} for other models."""
    return {
        layer: name
        for name, layer in model.named_modules()
        if getattr(getattr(layer, "moe_runner_config", None), "gemm1_alpha", None) is not None
        and hasattr(layer, "w13_weight_bias")
    }


def clear_further_biases(model: torch.nn.Module) -> None:
    """Set the biases of down projections to zero on all ranks but the first, see OfFirstRank.

    They are random if the engine started with load_format=dummy, or after it has released its memory.
    """
    for layer in _clamped_experts(model):
        if layer.moe_tp_rank > 0:
            layer.w2_weight_bias.data.zero_()


def _adapter_matrices(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return {name: this rank's part} of the matrices A [rank, in] and B [out, rank] of the served adapter.

    SGLang has them in buffers [ADAPTER_SLOTS, ...]. It computes with what is written here, because the
    adapter is pinned to its slot (EngineControl.prepare).
    """
    found = {}
    for name, layer in model.named_modules():
        for matrix, names in ((A, ("A_buffer", "A_buffer_qkv")), (B, ("B_buffer", "B_buffer_qkv"))):
            for buffer in names:
                if hasattr(layer, buffer):
                    found[f"{name}{matrix}"] = getattr(layer, buffer)[_OURS]
    return found


def reset_kv_scales(model: torch.nn.Module) -> None:
    """Set the scales of an FP8 KV cache to 1 in the engine's model, because the trainer has no such scales.

    FP8 engines for some model families, such as Llama, Qwen2 and Mixtral, have these scales as parameters.
    Their values are lost when the engine releases the memory of the weights. They are random if the engine
    started with load_format=dummy.
    """
    for module in model.modules():
        for name in KV_SCALES:
            if isinstance(scale := getattr(module, name, None), torch.nn.Parameter):
                scale.data.fill_(1.0)
                # Some attention backends read this copy of the number on the host.
                setattr(module, f"{name}_float", 1.0)


def refresh_norms(model: torch.nn.Module) -> None:
    """Compute the buffers 1 + weight of zero-centred norms anew. Some of SGLang's GPU kernels read them."""
    for module in model.modules():
        buffer = getattr(module, "gemma_weight", None)
        if buffer is not None:
            torch.add(module.weight, 1.0, out=buffer)


def _receiver(command: SyncCommand, me: EngineRank, model: torch.nn.Module) -> WeightReceiver:
    """Return the object that receives the trainer's weights on this rank. Create it if necessary.

    The object is kept in `model`. If the kept object has another setup than `command.setup`, it is closed and
    replaced.
    """
    kept: WeightReceiver | None = model.__dict__.get(_RECEIVER)
    if kept is None or kept.setup != command.setup:
        if kept is not None:
            kept.close()
            kept = model.__dict__[_RECEIVER] = None  # its buffers are freed before others are allocated
        device = next(model.parameters()).device
        kept = model.__dict__[_RECEIVER] = WeightReceiver(command.setup, me, device)
    return kept
