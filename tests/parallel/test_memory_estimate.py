"""The arithmetic of preflight.memory_estimate against what real ranks hold."""

import pytest

from grpo_megatron.config.schema import MegatronConfig, OptimizerConfig, Precision, Recompute
from grpo_megatron.megatron.spec import ActorSpec
from grpo_megatron.model.families import read_architecture
from grpo_megatron.model.parallel_sizes import ParallelSizes
from grpo_megatron.preflight.memory_estimate import kept_of_layers, training_states
from tests.models import tiny_model
from tests.parallel import memories
from tests.parallel.test_invariance import TOKEN, make_batch

# Family, whether its embeddings are tied, layout.
LAYOUTS = {
    "fp32": ("qwen3", False, MegatronConfig(precision=Precision.fp32)),
    "tp2 tied": ("qwen3", True, MegatronConfig(tensor_parallel=2, sequence_parallel=True)),
    "pp2 tied": ("llama3", True, MegatronConfig(pipeline_parallel=2)),
    "pp2vpp2": ("llama3", False, MegatronConfig(pipeline_parallel=2, virtual_pipeline=2)),
    "dp2": ("qwen3", False, MegatronConfig(data_parallel=2)),
    "dp2 distributed": ("qwen3", False, MegatronConfig(data_parallel=2, distributed_optimizer=True)),
    "fp32 dp2 distributed": (
        "qwen3",
        False,
        MegatronConfig(data_parallel=2, distributed_optimizer=True, precision=Precision.fp32),
    ),
    "experts dp2 distributed": ("qwen3_moe", False, MegatronConfig(data_parallel=2, distributed_optimizer=True)),
    "ep2 distributed": (
        "qwen3_moe",
        False,
        MegatronConfig(data_parallel=2, expert_parallel=2, distributed_optimizer=True),
    ),
    "latent": ("deepseek_v3", False, MegatronConfig()),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_parameters_gradients_and_optimizer_states_are_those_of_real_ranks(ranks, tmp_path, layout):
    family, tied, megatron = LAYOUTS[layout]
    model = tiny_model(tmp_path / "model", family, tied, hidden_size=256, intermediate_size=512)
    sizes = ParallelSizes.from_config(megatron)
    options = {"precision": megatron.precision, "distributed_optimizer": megatron.distributed_optimizer}
    spec = ActorSpec(str(model), sizes, OptimizerConfig(lr=1e-3), offload_folder=str(tmp_path), **options)
    batches = [make_batch(seed) for seed in range(2)]
    expected = training_states(read_architecture(model), megatron)
    for rank, (_, reports) in enumerate(ranks.run(memories.train, sizes, spec, batches, TOKEN, True)):
        state, real = expected[rank // (sizes.world_size // sizes.pp)], reports[0]["before"]
        for kind in ("parameters", "gradients", "optimizer"):
            # Buffers of the distributed optimizer are padded.
            assert getattr(state, kind) == pytest.approx(real[kind], rel=0.02), kind


KEPT = {
    "dense": ("qwen3", {}),
    "mlp recomputed": ("qwen3", {"recompute": Recompute.selective, "recompute_modules": ["mlp"]}),
    "layers recomputed": ("qwen3", {"recompute": Recompute.full}),
    "experts": ("qwen3_moe", {}),
    "latent attention": ("deepseek_v3", {}),
}


@pytest.mark.parametrize("case", KEPT)
def test_activations_are_about_what_real_layers_keep(ranks, tmp_path, case):
    """Layers of torch keep more: probabilities, angles, a copy here and there."""
    family, recompute = KEPT[case]
    model = tiny_model(tmp_path / "model", family, hidden_size=256, intermediate_size=512)
    arch, megatron = read_architecture(model), MegatronConfig(precision=Precision.fp32, **recompute)
    spec = ActorSpec(model, ParallelSizes(), OptimizerConfig(lr=1e-3), **recompute)
    ((kept, tokens),) = ranks.run(memories.kept_for_backward, spec.sizes, spec, make_batch(0), TOKEN)
    expected = tokens * sum(kept_of_layers(arch, megatron, stage=0))
    assert 0.95 <= kept / expected <= 1.6, (kept, expected)
