"""The planner's numbers for models with gated delta networks, against numbers by hand and published sizes."""

from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from grpo_megatron.capabilities import GPUS
from grpo_megatron.config.load import read_config
from grpo_megatron.megatron.layers.delta_net import DeltaNetLayer, GatedNorm
from grpo_megatron.megatron.layers.delta_rule import Chunks
from grpo_megatron.megatron.layers.head_exchange import HeadExchange
from grpo_megatron.model.architecture import DeltaNet
from grpo_megatron.model.families import read_architecture
from grpo_megatron.model.parallel_sizes import ParallelSizes
from grpo_megatron.planner.activations import LayerKind, delta_bytes, kept_by_layer, layers_of
from grpo_megatron.planner.advice import planned_architecture
from grpo_megatron.planner.rates import ATTENTION, BANDWIDTH, LAYER_SECONDS, PRODUCTS
from grpo_megatron.planner.states import stage_elements
from tests.unit.published_runs import QWEN35_397B
from tests.unit.small_plans import SMALL, moments, planned
from tests.unit.test_hybrids import NEXT, written

# Qwen3.5-27B as published.
QWEN35_27B = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "head_dim": 256,
    "hidden_size": 5120,
    "intermediate_size": 17408,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 48,
    "linear_value_head_dim": 128,
    "num_attention_heads": 24,
    "num_hidden_layers": 64,
    "num_key_value_heads": 4,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 248320,
}
# Bytes of the recurrent states of a request of Qwen3-Next: 36 layers with 32 float32 states, and three tokens
# of the convolution's 8,192 channels.
STATES = 36 * (4 * 32 * 128 * 128 + 2 * 3 * 8192)


def small(folder, model, *overrides):
    """Return the plan of a model on nodes of eight GPUs of 80 GB, half of which generate."""
    path = written(folder, model)
    return planned(read_config(None, [*SMALL, f"model.path={path}", *overrides]), prompt=256, response=256)


NEXT_ON_H100 = (
    "cluster.nodes=3",
    "megatron.tensor_parallel=2",
    "megatron.sequence_parallel=true",
    "megatron.expert_parallel=8",
    "megatron.data_parallel=8",
    "megatron.distributed_optimizer=true",
    "optimizer.offload=true",
    "train.max_tokens_per_micro_batch=2048",
    "megatron.recompute=full",
    "rollout.engine.tensor_parallel=4",
)


@pytest.mark.parametrize(
    ("model", "billions", "without_embedding"),
    [(NEXT, 80, 79), (QWEN35_27B, 27, None), (QWEN35_397B, 396, None)],
    ids=["Qwen3-Next-80B-A3B", "Qwen3.5-27B", "Qwen3.5-397B-A17B"],
)
def test_parameters_are_as_many_as_published(tmp_path, model, billions, without_embedding):
    """The published 397 billion include a vision model and a layer for multi-token prediction."""
    arch = read_architecture(model if isinstance(model, str) else written(tmp_path, model))
    sizes = ParallelSizes(tp=2, dp=4, ep=8 if arch.moe else 1, sequence_parallel=True)
    ((dense, experts),) = stage_elements(arch, sizes)
    whole = 2 * dense + experts * sizes.ep
    assert round(whole / 1e9) == billions
    if without_embedding:
        assert round((whole - 2 * arch.vocab_size * arch.hidden_size) / 1e9) == without_embedding


def test_training_memory_of_qwen3_next_by_hand(tmp_path):
    found = small(tmp_path, NEXT, *NEXT_ON_H100)
    experts = 48 * 512 * 3 * 2048 * 512 // 8
    shared = 48 * (3 * 2048 * 512 // 2 + 2048 + 512 * 2048)
    # Queries, keys, values, gates, betas, alphas; convolution; output projection; decays, and a norm.
    projected = 2 * 2048 + 2 * 4096 + 2 * 32
    delta = 36 * ((2048 * projected + 4 * 8192 + 2048 * 4096 + 2 * 32) // 2 + 128)
    attention = 12 * ((2048 * (2 * 16 + 2 * 2) * 256 + 16 * 256 * 2048) // 2 + 2 * 256)
    dense = delta + attention + shared + 48 * 2 * 2048 + 2 * 151936 * 2048 // 2 + 2048
    state = found.memory.state
    assert state.parameters == 2 * (dense + experts)
    assert state.optimizer == 12 * (dense // 8 + experts // 2)
    # Whole layers are recomputed: only their inputs are kept.
    assert moments(found)["training"].items["activations kept"] == 2 * 2048 * 48 * 2048 // 2


def test_an_engine_has_room_for_states_and_a_cache_of_attention_layers(tmp_path):
    """Each of four ranks has a key and a value of one head in 12 layers, and a quarter of the states."""
    pool, size, token = int(0.8 * GPUS["h100-80g"].memory), STATES // 4, 12 * 2 * 256 * 2
    found = small(tmp_path, NEXT, *NEXT_ON_H100, "rollout.engine.prefix_cache=false")
    rest = pool - found.memory.engine_weights
    assert found.memory.room.requests == 256
    assert found.memory.room.state_bytes == 257 * size
    assert found.memory.room.tokens == (rest - 257 * size) // token
    items = moments(found)["generation"].items
    assert items["engine: recurrent states"] + items["engine: KV cache"] == rest
    # With the prefix cache, SGLang keeps 0.9 / 1.9 of the memory for states, five for each request and one.
    found = small(tmp_path, NEXT, *NEXT_ON_H100)
    states = int(rest * 0.9 / 1.9) // size
    assert found.memory.room.state_bytes == states * size
    assert found.memory.room.requests == (states - 1) // 5 < 256
    assert found.memory.room.tokens == (rest - states * size) // token


def test_an_engine_rank_has_its_part_of_the_weights(tmp_path):
    found = small(tmp_path, NEXT, *NEXT_ON_H100)
    experts = 48 * 512 * 3 * 2048 * 512 // 4
    delta = 36 * (2048 * (2 * 2048 + 2 * 4096 + 2 * 32) + 4 * 8192 + 2048 * 4096) // 4
    # Each of the two KV heads is on two of the four ranks.
    attention = 12 * 2048 * ((3 * 16 // 4) + 2) * 256
    rest = 48 * (3 * 2048 * 512 // 4 + 512 * 2048) + 2 * 151936 * 2048 // 4
    assert found.memory.engine_weights == pytest.approx(2 * (experts + delta + attention + rest), rel=1e-4)


def test_an_engine_without_room_for_states_is_a_problem(tmp_path):
    found = small(tmp_path, NEXT, *NEXT_ON_H100, "rollout.engine.mem_fraction=0.472")
    assert any("no room for the recurrent states of one request" in problem for problem in found.problems)


def test_decoding_reads_and_writes_states(tmp_path):
    """64 requests on each of four engines. On average, a response takes part in half of the steps."""
    settings = (
        "cluster.gpu=h200",
        "cluster.nodes=6",
        "rollout.engine.num_engines=4",
        "rollout.engine.prefix_cache=false",
    )
    found = small(tmp_path, NEXT, *NEXT_ON_H100, *settings)
    untouched = (1 - 10 / 512) ** 32
    weights = found.memory.engine_weights - untouched * 2 * 48 * 512 * 3 * 2048 * 512 / 4
    cache = 32 * ((256 + 128) * 12 * 2 * 256 * 2 + 2 * STATES / 4)
    reduced = 2 * (10e-6 + 2 * 32 * 2048 * 2 / (0.8 * 450e9))
    step = (weights + cache) / (BANDWIDTH * 4.8e12) + 48 * (LAYER_SECONDS + reduced)
    assert found.times.seconds["generation"] == pytest.approx(512 * step, rel=0.02)


def test_a_pass_takes_the_states_once_more_through_memory(tmp_path):
    """Four layers of Qwen3.5-27B without parallelism: one with attention, three without."""
    settings = ("cluster.gpu=h200", "train.max_tokens_per_micro_batch=2048")
    found = small(tmp_path, QWEN35_27B | {"num_hidden_layers": 4}, *settings)
    delta = 5120 * (2 * 2048 + 3 * 6144 + 2 * 48)
    attention = 5120 * 256 * (3 * 24 + 2 * 4)
    weights = 3 * delta + attention + 4 * 3 * 5120 * 17408 + 248320 * 5120
    pairs = 4 * 24 * 256 * 512 * 513 / 2
    kept = 3 * 512 * delta_bytes(DeltaNet(16, 48, 128, 128, 4, ()), 1, 2, False)
    moving = 2 * kept / (BANDWIDTH * 4.8e12)
    assert moving > 2 * 3 * 3 * 512 * 6144 * 128 / (ATTENTION * 989e12)
    forward = 2 * weights * 512 / (PRODUCTS * 989e12) + pairs / (ATTENTION * 989e12) + moving
    assert found.times.seconds["training"] == pytest.approx(3 * 256 * forward, rel=1e-3)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(("heads", "key_dim"), [((2, 4), 128), ((2, 2), 64)])
def test_a_delta_network_keeps_what_is_planned(size, heads, key_dim):
    """Counted in the tensors that the layer's own code keeps for the backward pass."""
    delta = DeltaNet(*heads, key_dim, 128, 4, ())
    kept = kept_for_backward(delta, torch.bfloat16 if size == 2 else torch.float32)
    planned = delta_bytes(delta, 1, size, False) - size * delta.value_rows  # the output projection's input
    assert kept == pytest.approx(planned, rel=0.05)


def kept_for_backward(delta: DeltaNet, dtype: torch.dtype, tokens: int = 1024) -> float:
    """Return the bytes per token that the layer keeps between its two projections, for one sequence."""
    keys, values, heads = delta.key_rows, delta.value_rows, delta.value_heads
    settings = SimpleNamespace(use_cpu_initialization=True, params_dtype=dtype, sequence_parallel=True)
    norm = GatedNorm(settings, delta.value_dim, 1e-6)
    torch.nn.init.ones_(norm.weight)
    weights = {
        "weight": (2 * keys + values, 1, delta.kernel),
        "A_log": (heads,),
        "dt_bias": (heads,),
    }
    weights = {name: torch.nn.Parameter(torch.ones(shape, dtype=dtype)) for name, shape in weights.items()}
    layer = SimpleNamespace(
        tp_size=1,
        qk_dim=keys,
        v_dim=values,
        num_value_heads=heads,
        key_head_dim=delta.key_dim,
        value_head_dim=delta.value_dim,
        conv1d=SimpleNamespace(weight=weights.pop("weight")),
        out_norm=norm,
        exchange=HeadExchange(SimpleNamespace(size=lambda: 1)),
        **weights,
    )
    layer._sections = partial(DeltaNetLayer._sections, layer)
    packed = SimpleNamespace(
        position_ids=torch.arange(tokens),
        chunks=lambda: Chunks.of(np.array([tokens]), torch.device("cpu")),
    )
    projected = torch.randn(tokens, 2 * keys + 2 * values + 2 * heads).to(dtype).requires_grad_()
    sizes, alive = {}, []

    def count(tensor):
        alive.append(tensor)  # otherwise its memory would be used again
        if not isinstance(tensor, torch.nn.Parameter):
            storage = tensor.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        DeltaNetLayer._core(layer, projected, packed)
    return sum(sizes.values()) / tokens


def test_recomputation_of_the_core_keeps_its_input_and_output(tmp_path):
    arch = read_architecture(written(tmp_path, NEXT))
    recomputed = ["megatron.recompute=selective", "megatron.recompute_modules=[core_attn]"]
    config, whole = (read_config(None, [*SMALL, *settings]) for settings in (recomputed, []))
    kind = LayerKind(True, True)
    saved = kept_by_layer(arch, whole.megatron, kind) - kept_by_layer(arch, config.megatron, kind)
    projected = 2 * (2 * 2048 + 3 * 4096 + 2 * 32)
    assert saved == delta_bytes(arch.delta, 1, 2, False) - projected > 0


def test_stages_have_the_layers_of_each_kind(tmp_path):
    arch = read_architecture(written(tmp_path, NEXT))
    stages = layers_of(arch, ParallelSizes(pp=2, pipeline_layers=(23, 25)))
    assert stages == ({(True, True): 18, (True, False): 5}, {(True, True): 18, (True, False): 7})


def test_the_plan_command_reads_them(tmp_path):
    config = read_config(None, [*SMALL, f"model.path={written(tmp_path, NEXT)}"])
    assert planned_architecture(config).num_recurrent == 36
