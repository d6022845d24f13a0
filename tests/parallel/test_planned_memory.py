"""The planner's memory against that of real ranks."""

import pytest

from grpo_megatron.config.schema import (
    ClusterConfig,
    Config,
    MegatronConfig,
    OptimizerConfig,
    Placement,
    Precision,
    Recompute,
)
from grpo_megatron.model.families import read_architecture
from grpo_megatron.model.parallel_sizes import ParallelSizes
from grpo_megatron.planner.activations import kept_by_layer, layers_of
from grpo_megatron.planner.memory import memory
from grpo_megatron.planner.states import training_states
from tests.configs import actor_config, sizes_of
from tests.models import tiny_model
from tests.parallel import memories
from tests.parallel.test_invariance import TOKEN, make_batch

# Family, whether its embeddings are tied, layout.
LAYOUTS = {
    "fp32": ("qwen3", False, MegatronConfig(precision=Precision.fp32)),
    "tp2 tied": ("qwen3", True, MegatronConfig(tensor_parallel=2, sequence_parallel=True)),
    "pp2 tied": ("llama3", True, MegatronConfig(pipeline_parallel=2)),
    "pp2vpp2": ("llama3", False, MegatronConfig(pipeline_parallel=2, virtual_pipeline=2)),
    "pp2vpp2 dp2 distributed tied": (
        "llama3",
        True,
        MegatronConfig(pipeline_parallel=2, virtual_pipeline=2, data_parallel=2, distributed_optimizer=True),
    ),
    "dp2": ("qwen3", False, MegatronConfig(data_parallel=2)),
    "dp2 distributed": ("qwen3", False, MegatronConfig(data_parallel=2, distributed_optimizer=True)),
    "fp32 dp2 distributed": (
        "qwen3",
        False,
        MegatronConfig(data_parallel=2, distributed_optimizer=True, precision=Precision.fp32),
    ),
    "experts dp2 distributed": (
        "qwen3_moe",
        False,
        MegatronConfig(data_parallel=2, distributed_optimizer=True),
    ),
    "ep2 distributed": (
        "qwen3_moe",
        False,
        MegatronConfig(data_parallel=2, expert_parallel=2, distributed_optimizer=True),
    ),
    "tp2 dp2 ep2 etp2 distributed": (
        "qwen3_moe",
        False,
        MegatronConfig(
            tensor_parallel=2,
            sequence_parallel=True,
            data_parallel=2,
            expert_parallel=2,
            expert_tensor_parallel=2,
            distributed_optimizer=True,
        ),
    ),
    "latent": ("deepseek_v3", False, MegatronConfig()),
}
# Others have the same parts, in one layout.
SLOW = (
    *("fp32", "pp2 tied", "pp2vpp2", "dp2", "experts dp2 distributed", "ep2 distributed"),
    *("tp2 tied", "dp2 distributed", "fp32 dp2 distributed"),
)


def resident(ranks, folder, family, tied, megatron, optimizer):
    """(Architecture, bytes by kind of each rank between two steps)"""
    model = tiny_model(folder / "model", family, tied, hidden_size=256, intermediate_size=512)
    options = {"precision": megatron.precision, "distributed_optimizer": megatron.distributed_optimizer}
    config = actor_config(
        str(model), ParallelSizes.from_config(megatron), optimizer, offload_folder=str(folder), **options
    )
    batches = [make_batch(seed) for seed in range(2)]
    found = ranks.run(memories.train, sizes_of(config), config, batches, TOKEN, True)
    return read_architecture(model), [reports[0]["before"] for _, reports in found]


@pytest.mark.slow_when(lambda layout: layout in SLOW)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_parameters_gradients_and_optimizer_states_are_those_of_real_ranks(ranks, tmp_path, layout):
    family, tied, megatron = LAYOUTS[layout]
    arch, found = resident(ranks, tmp_path, family, tied, megatron, OptimizerConfig(lr=1e-3))
    expected = training_states(arch, megatron)
    for rank, real in enumerate(found):
        state = expected[rank * megatron.pipeline_parallel // len(found)]
        for kind in ("parameters", "gradients", "optimizer"):
            # Buffers of the distributed optimizer are padded.
            assert getattr(state, kind) == pytest.approx(real[kind], rel=0.02), kind


@pytest.mark.slow
def test_offloaded_states_are_where_the_plan_has_them(ranks, tmp_path):
    megatron = MegatronConfig(data_parallel=2, distributed_optimizer=True)
    optimizer = OptimizerConfig(lr=1e-3, offload=True)
    arch, found = resident(ranks, tmp_path, "qwen3", False, megatron, optimizer)
    cluster = ClusterConfig(placement=Placement.separate, gpu="h100-80g", nodes=1, gpus_per_node=2)
    planned = memory(Config(megatron=megatron, optimizer=optimizer, cluster=cluster), arch)
    training, stepping, *_ = planned.moments
    for real in found:
        for kind in ("parameters", "gradients", "optimizer"):
            assert training.items[kind] == pytest.approx(real[kind], rel=0.02), kind
    assert training.items["optimizer"] == 0
    assert (
        stepping.items["optimizer"]
        == planned.host["optimizer"] / cluster.gpus_per_node
        == planned.state.optimizer
    )


KEPT = {
    "dense": ("qwen3", {}),
    "mlp recomputed": ("qwen3", {"recompute": Recompute.selective, "recompute_modules": ["mlp"]}),
    "layers recomputed": ("qwen3", {"recompute": Recompute.full}),
    "experts": ("qwen3_moe", {}),
    "latent attention": ("deepseek_v3", {}),
}


@pytest.mark.slow_when(lambda case: case not in ("mlp recomputed", "experts"))
@pytest.mark.parametrize("case", KEPT)
def test_activations_are_about_what_real_layers_keep(ranks, tmp_path, case):
    """torch's layers keep more: probabilities, angles, a copy here and there."""
    family, recompute = KEPT[case]
    model = tiny_model(tmp_path / "model", family, hidden_size=256, intermediate_size=512)
    arch = read_architecture(model)
    config = actor_config(model, ParallelSizes(), OptimizerConfig(lr=1e-3), **recompute)
    ((kept, tokens),) = ranks.run(memories.kept_for_backward, sizes_of(config), config, make_batch(0), TOKEN)
    (kinds,) = layers_of(arch, sizes_of(config))
    expected = tokens * sum(
        count * kept_by_layer(arch, config.megatron, kind) for kind, count in kinds.items()
    )
    assert 0.95 <= kept / expected <= 1.6, (kept, expected)
