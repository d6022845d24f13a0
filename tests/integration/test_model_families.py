"""Families of models in the whole program: generation by a real engine, training, and weight sync."""

import json
import shutil

import pytest

from grpo_megatron.cli import main
from tests.integration.train_runs import arguments, metrics
from tests.models import ALL_FAMILIES, KIMI_K2, SERVED, tiny_model
from tests.vision_models import vision_model

# The engine applies the adapter to weights of its own.
ADAPTER = "megatron.lora.rank=4", "weight_sync.lora=adapter"
WITH_EXPERTS = "moe.routing_replay=engine", "megatron.expert_parallel=2"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "transport", "placement", "more"),
    [
        ("glm4_moe", "shared_memory", "separate", ()),
        # Engines that gave back their weights have lost what is derived from them, too.
        ("deepseek_v3", "shared_memory", "colocated", ()),
        ("minimax_m2", "shared_memory", "separate", ()),
        ("kimi_k2", "shared_memory", "separate", ()),
        # It has YaRN's rotary embedding.
        ("qwen2", "shared_memory", "separate", ()),
        ("qwen3_next", "shared_memory", "separate", ()),
        ("qwen3_5", "shared_memory", "colocated", ()),
        # In a checkpoint with a vision model, which the engine leaves out.
        ("qwen3_5_moe", "shared_memory", "separate", ()),
        # Its engine has gate and up rows interleaved, and sinks.
        ("gpt_oss", "shared_memory", "colocated", ()),
        # Beside a vision model, too.
        ("gemma3", "shared_memory", "separate", ()),
        ("gemma3", "groups", "separate", ADAPTER),
        ("gpt_oss", "groups", "separate", (*ADAPTER, "megatron.lora.targets=[q_proj,k_proj,v_proj,o_proj]")),
    ],
)
def test_engine_and_trainer_agree_before_and_after_syncs(
    ray_here, arithmetic, tmp_path, family, transport, placement, more
):
    from make_tiny_model import make_tokenizer

    layers, changes = {"kimi_k2": ("deepseek_v3", KIMI_K2)}.get(family, (family, SERVED.get(family, {})))
    has_experts = layers not in ("qwen2", "qwen3_5", "gemma3")
    # On a CPU, SGLang pads MLPs whose width is no multiple of 32. With these weights, log-probs in float32
    # are about 1e-6 from those in float64.
    sizes = {"vocab_size": len(make_tokenizer()), "intermediate_size": 128, "initializer_range": 0.06}
    experts = "moe_intermediate_size", "shared_expert_intermediate_size"
    sizes |= {size: 64 for size in experts if size in ALL_FAMILIES[layers][1]}
    model = tmp_path / "task" / "model"
    has_vision = layers in ("qwen3_5_moe", "gemma3")
    (vision_model if has_vision else tiny_model)(model, layers, **sizes, **changes)
    if family == "kimi_k2":
        config = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(json.dumps(config | {"model_type": "kimi_k2"}))
    for path in (arithmetic / "model").glob("*token*"):
        shutil.copy(path, model)
    shutil.copy(arithmetic / "model" / "chat_template.jinja", model)
    (tmp_path / "task" / "data").symlink_to(arithmetic / "data")
    changes = (
        f"run.name={family}",
        "run.total_steps=3",
        "optimizer.lr_warmup_steps=0",
        "megatron.tensor_parallel=2",
        "megatron.sequence_parallel=true",
        f"weight_sync.transport={transport}",
        f"cluster.placement={placement}",
        # Buckets of a few tensors: each layer's come in several.
        "weight_sync.bucket_bytes=8000",
        *(WITH_EXPERTS if has_experts else ()),
        *more,
    )
    assert main(["train", *arguments(tmp_path / "task", tmp_path, *changes)]) == 0
    rows = metrics(tmp_path, family)
    print(family, [row["mismatch/max"] for row in rows])
    assert all(0 < row["mismatch/max"] <= 1e-5 for row in rows)
    assert rows[-1]["actor/kl_to_reference"] > 1e-4
