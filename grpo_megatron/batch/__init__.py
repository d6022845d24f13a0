"""The data contract: Sample and Group from generation, flat TrainBatch, weights, schedule, Layout."""

from grpo_megatron.batch.layout import Layout, Pack
from grpo_megatron.batch.sample import Group, Prompt, Sample, WeightSpan
from grpo_megatron.batch.schedule import CostModel, Schedule, schedule
from grpo_megatron.batch.train_batch import TrainBatch
from grpo_megatron.batch.weights import LOSS_AGG_MODES, token_weights

__all__ = [
    "LOSS_AGG_MODES",
    "CostModel",
    "Group",
    "Layout",
    "Pack",
    "Prompt",
    "Sample",
    "Schedule",
    "TrainBatch",
    "WeightSpan",
    "schedule",
    "token_weights",
]
