"""An FP8 engine lost the scales of its FP8 KV cache when it first gave its memory to the trainer.

They are in the memory of the weights. After that was resumed, they had whatever the new pages held. With
zeros, all keys are zero.
"""

from types import SimpleNamespace

import pytest
import torch

from grpo_megatron.model.adapters import Content
from grpo_megatron.sglang import weight_receiver
from grpo_megatron.weights.sync.messages import SyncCommand, SyncKind, SyncReport
from grpo_megatron.weights.sync.plan import EngineRank

MERGED = SimpleNamespace(layouts=SimpleNamespace(content=Content.merged))


def make_scales(attention: torch.nn.Module) -> None:
    """Do what SGLang's BaseKVCacheMethod does, whose import takes seconds."""
    for name in ("k_scale", "v_scale"):
        setattr(attention, name, torch.nn.Parameter(torch.tensor(-1.0), requires_grad=False))


def model(make=make_scales) -> torch.nn.Module:
    """Two layers with the scales of a KV cache, and a weight whose name resembles theirs."""
    whole = torch.nn.Module()
    whole.layers = torch.nn.ModuleList([torch.nn.Module() for _ in range(2)])
    for layer in whole.layers:
        layer.attn = torch.nn.Module()
        make(layer.attn)
        layer.attn.k_scale_float = layer.attn.v_scale_float = None
        layer.weight_scale = torch.nn.Parameter(torch.full((3,), 0.25))
        layer.k_scale = None  # attention without a cache in FP8 has the name, and no parameter
    return whole


def synced(whole: torch.nn.Module, kind: SyncKind, monkeypatch) -> set[str]:
    """Carry out a command on the model and return the names of the parameters that the transport fills."""
    filled = set()

    class Receiver:
        def receive(self, command, parameters):
            filled.update(parameters)
            return SyncReport()

    monkeypatch.setattr(weight_receiver, "_receiver", lambda *_: Receiver())
    weight_receiver._carry_out(SyncCommand(kind, 1, setup=MERGED), EngineRank(0, 0), whole)
    return filled


@pytest.mark.parametrize(
    "left",
    [
        0.0,  # pages that the driver has cleared
        float("nan"),  # or that somebody else has used
        float("inf"),
        -1.0,  # SGLang's own mark for "not loaded"
        3e-4,  # load_format=dummy fills everything with small random numbers
        448.0,
        1.0,
    ],
)
def test_every_transfer_sets_the_scales(monkeypatch, left):
    whole = model()
    for layer in whole.layers:
        for name in ("k_scale", "v_scale"):
            getattr(layer.attn, name).data.fill_(left)
            setattr(layer.attn, f"{name}_float", left)
    places = [layer.attn.k_scale.data_ptr() for layer in whole.layers]
    filled = synced(whole, SyncKind.transfer, monkeypatch)
    assert filled == {f"layers.{number}.weight_scale" for number in range(2)}
    for layer in whole.layers:
        assert layer.attn.k_scale.item() == layer.attn.v_scale.item() == 1.0
        assert layer.attn.k_scale_float == layer.attn.v_scale_float == 1.0
        assert layer.weight_scale.tolist() == [0.25] * 3
    # CUDA graphs read them where they were when the graphs were captured.
    assert [layer.attn.k_scale.data_ptr() for layer in whole.layers] == places


def test_a_comparison_changes_nothing(monkeypatch):
    whole = model()
    synced(whole, SyncKind.verify, monkeypatch)
    assert whole.layers[0].attn.k_scale.item() == -1.0


@pytest.mark.slow
def test_the_scales_are_those_that_sglang_makes(monkeypatch):
    kv_cache = pytest.importorskip("sglang.srt.layers.quantization.kv_cache")
    whole, made = model(kv_cache.BaseKVCacheMethod(None).create_weights), model()
    shapes = [
        {name: (own.shape, own.dtype) for name, own in each.named_parameters()} for each in (whole, made)
    ]
    assert shapes[0] == shapes[1]
    synced(whole, SyncKind.transfer, monkeypatch)
    assert whole.layers[1].attn.v_scale.item() == 1.0


def test_norms_that_add_1_to_their_weight_follow_it(monkeypatch):
    """SGLang's GemmaRMSNorm keeps the sum in a buffer, which only SGLang's own loader refreshes."""
    whole = torch.nn.Module()
    whole.norm = torch.nn.Module()
    whole.norm.weight = torch.nn.Parameter(torch.tensor([0.5, -0.25]))
    whole.norm.register_buffer("gemma_weight", torch.full((2,), torch.nan))
    place = whole.norm.gemma_weight.data_ptr()
    synced(whole, SyncKind.transfer, monkeypatch)
    assert whole.norm.gemma_weight.tolist() == [1.5, 0.75]
    assert whole.norm.gemma_weight.data_ptr() == place


def test_an_engine_without_scales_has_nothing_to_set(monkeypatch):
    whole = torch.nn.Linear(2, 2)
    before = whole.weight.clone()
    assert synced(whole, SyncKind.transfer, monkeypatch) == {"weight", "bias"}
    assert torch.equal(whole.weight, before)
