"""What a configuration takes of its GPUs' and hosts' memory, by arithmetic; no weights are read.

    python tools/estimate_memory.py CONFIG MODEL [key=value ...]
    python tools/estimate_memory.py --table

MODEL is a folder with a config.json. cluster.gpu and cluster.gpus_per_node must be set. --table prints the table of docs/recipes.md.
"""

import argparse
from pathlib import Path

from grpo_megatron.capabilities import GPUS
from grpo_megatron.config.load import read_config
from grpo_megatron.config.schema import Config
from grpo_megatron.errors import UserError
from grpo_megatron.model.families import read_architecture
from grpo_megatron.preflight.memory_estimate import Estimate, estimate

CONFIGS = Path(__file__).resolve().parent.parent / "configs"
# The configurations for clusters, and their models in configs/models.
RECIPES = {
    "qwen3_8b_1node": "qwen3-8b",
    "llama3_70b_16node": "llama-3.1-70b",
    "llama3_70b_fp8_16node": "llama-3.1-70b",
    "qwen2.5_72b_16node": "qwen2.5-72b",
    "qwen3_30b_a3b_4node": "qwen3-30b-a3b",
    "qwen3_235b_a22b_16node": "qwen3-235b-a22b",
    "deepseek_v3_32node": "deepseek-v3",
}
HEAD = (
    "configuration",
    "trainer",
    "engines",
    "parameters",
    "gradients",
    "optimizer",
    "activations",
    "training",
    "optimizer step",
    "weight sync",
    "generation",
    "weights of an engine",
    "tokens in its KV cache",
    "host, a node",
)


def of_model(config: str, model: str, overrides: list[str]) -> tuple[Config, Estimate]:
    """Raises UserError for what cannot be read, or without the facts of the cluster."""
    found = read_config(config, [f"model.path={model}", *overrides])
    if found.cluster.gpu not in GPUS or found.cluster.gpus_per_node is None:
        raise UserError("the memory of a GPU is not known: set cluster.gpu and cluster.gpus_per_node")
    if found.megatron.lora.rank:
        raise UserError("this arithmetic is of the whole model's training; it cannot be asked with megatron.lora.rank")
    return found, estimate(found, read_architecture(model))


def row(name: str, config: Config, found: Estimate) -> tuple[str, ...]:
    megatron, engine, state = config.megatron, config.rollout.engine, found.state
    sizes = {
        "TP": megatron.tensor_parallel,
        "PP": megatron.pipeline_parallel,
        "CP": megatron.context_parallel,
        "EP": megatron.expert_parallel,
        "DP": megatron.data_parallel,
    }
    moments = (found.training, found.stepping, found.syncing, found.serving)
    return (
        name,
        " ".join(f"{axis}{size}" for axis, size in sizes.items() if size > 1),
        f"{engine.num_engines} x TP{engine.tensor_parallel}, {config.cluster.placement.value}",
        *(f"{size / 1e9:.1f}" for size in (state.parameters, state.gradients, state.optimizer, found.activations)),
        *(f"{size / 1e9:.1f}" for size in moments),
        f"{found.engine_weights / 1e9:.1f}",
        f"{found.kv_tokens:,}",
        f"{found.host / 1e9:.0f}",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", nargs="?", metavar="CONFIG")
    parser.add_argument("model", nargs="?", metavar="MODEL")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    try:
        if options.table:
            rows = [
                row(name, *of_model(str(CONFIGS / f"{name}.yaml"), str(CONFIGS / "models" / model), []))
                for name, model in RECIPES.items()
            ]
        elif options.model is None:
            raise UserError("name a configuration and a folder with a config.json, or say --table")
        else:
            found = of_model(options.config, options.model, options.overrides)
            rows = [row(Path(options.config).stem, *found)]
    except UserError as error:
        parser.exit(2, f"error: {error}\n")
    print("| " + " | ".join(HEAD) + " |")
    print("|" + "---|" * len(HEAD))
    for cells in rows:
        print("| " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
