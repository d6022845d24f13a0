"""Print the table of docs/recipes.md: the computed GPU and host memory of the cluster configurations.

    python tools/plan_recipes.py

`grpo-megatron plan` prints the same, and more, for any configuration.
"""

from pathlib import Path

from grpo_megatron.config.load import read_config
from grpo_megatron.config.schema import Config
from grpo_megatron.model.families import read_architecture
from grpo_megatron.planner.plan import Plan, gb, plan
from grpo_megatron.planner.text import engines_text, trainer_text

CONFIGS = Path(__file__).resolve().parent.parent / "configs"
# Configuration for a cluster -> its model in configs/models.
RECIPES = {
    "qwen3_8b_1node": "qwen3-8b",
    "llama3_70b_16node": "llama-3.1-70b",
    "llama3_70b_fp8_16node": "llama-3.1-70b",
    "qwen2.5_72b_16node": "qwen2.5-72b",
    "qwen3_30b_a3b_4node": "qwen3-30b-a3b",
    "qwen3_235b_a22b_16node": "qwen3-235b-a22b",
    "deepseek_v3_32node": "deepseek-v3",
    "qwen3.5_397b_a17b_64node": "qwen3.5-397b-a17b",
}
_HEAD = ("configuration", "trainer", "engines")
_CAPACITY = ("tokens in a KV cache", "host, a node")


def recipe(name: str) -> Config:
    """Return the configuration configs/NAME.yaml. model.path is its model in configs/models (RECIPES)."""
    return read_config(str(CONFIGS / f"{name}.yaml"), [f"model.path={CONFIGS / 'models' / RECIPES[name]}"])


def planned(config: Config) -> Plan:
    return plan(config, read_architecture(config.model.path), with_sync=False)


def row(name: str, found: Plan) -> tuple[str, ...]:
    memory, config = found.memory, found.config
    return (
        name,
        trainer_text(config),
        engines_text(config),
        *(gb(moment.total) for moment in memory.moments),
        f"{memory.room.tokens:,}",
        f"{sum(memory.host.values()) / 1e9:.0f}",
    )


def main() -> None:
    plans = {name: planned(recipe(name)) for name in RECIPES}
    moments = [moment.name for moment in next(iter(plans.values())).memory.moments]
    head = (*_HEAD, *moments, *_CAPACITY)
    print("| " + " | ".join(head) + " |")
    print("|" + "---|" * len(head))
    for name, found in plans.items():
        print("| " + " | ".join(row(name, found)) + " |")


if __name__ == "__main__":
    main()
