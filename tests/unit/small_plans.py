"""Helpers of tests of the planner: plans of a configuration, and of a small run on two GPUs."""

from grpo_megatron.config.load import read_config
from grpo_megatron.model.families import read_architecture
from grpo_megatron.planner.lengths import Lengths
from grpo_megatron.planner.plan import plan

# One GPU trains, one generates; a mini-batch is a whole step.
SMALL = (
    "data.train=prompts.jsonl",
    "model.path=configs/models/qwen3-0.6b",
    "cluster.gpu=h100-80g",
    "cluster.nodes=1",
    "cluster.gpus_per_node=8",
    "train.old_logprobs=current",
)


def planned(config, **lengths):
    return plan(
        config, read_architecture(config.model.path), Lengths(**lengths) if lengths else None, with_sync=False
    )


def small(*overrides):
    return planned(read_config(None, [*SMALL, *overrides]), prompt=256, response=256)


def moments(found):
    return {moment.name: moment for moment in found.memory.moments}
