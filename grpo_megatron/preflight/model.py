"""Does the model fit the layout, the engines and the lengths that are configured."""

from grpo_megatron.config.schema import Config
from grpo_megatron.errors import UserError
from grpo_megatron.model.architecture import Architecture, read_architecture
from grpo_megatron.model.parallel_sizes import ParallelSizes
from grpo_megatron.preflight.layout import layout_violations, layout_violations_of_model
from grpo_megatron.weights.hf_checkpoint import HFCheckpoint


def check_model(config: Config) -> Architecture:
    """What can be wrong with model and layout, found before any process starts."""
    arch = read_architecture(config.model.path)
    sizes = ParallelSizes.from_config(config.megatron)
    broken = layout_violations(sizes) + layout_violations_of_model(sizes, arch)
    if broken:
        raise UserError(f"the layout does not fit {config.model.path}:\n" + "\n".join(f"  - {rule}" for rule in broken))
    engine_tp = config.rollout.engine.tensor_parallel
    if arch.num_heads % engine_tp:
        raise UserError(
            f"rollout.engine.tensor_parallel={engine_tp} does not divide the {arch.num_heads} attention heads of {config.model.path}"
        )
    if arch.family == "qwen3_moe" and not all(arch.moe.layers) and not config.rollout.replay:
        raise UserError(
            f"{config.model.path} has layers without experts (mlp_only_layers, decoder_sparse_step), which SGLang's Qwen3-MoE ignores: "
            "it would generate with uninitialised weights"
        )
    longest = config.data.max_prompt_length + config.rollout.max_response_length
    if longest > arch.max_positions:
        raise UserError(
            f"data.max_prompt_length + rollout.max_response_length = {longest}, but {config.model.path} is made for "
            f"{arch.max_positions} positions"
        )
    for path in {config.model.path, config.ref.path} - {None}:
        HFCheckpoint(path)
    return arch
