"""Helpers of tests of the monitor: scored groups, and a batch of them."""

import numpy as np

from grpo_megatron.batch.prompt import Prompt
from grpo_megatron.batch.sample import Group, Sample, WeightSpan
from grpo_megatron.batch.train_batch import TrainBatch


def group(number: int, rewards: tuple[float, ...], text: str = "well", version: int = 1) -> Group:
    prompt = Prompt(number, np.array([1, 2]), "what?", "this")
    samples = tuple(
        Sample.of(
            group_id=number,
            trajectory_id=10 * number + i,
            prompt_ids=prompt.ids,
            response_ids=np.array([3, 4, 5]),
            loss_mask=np.ones(3, dtype=bool),
            rollout_logprobs=np.zeros(3, dtype=np.float32),
            finish_reason="stop",
            weight_spans=(WeightSpan(version, 0, 3),),
            response_text=text,
            reward=reward,
            reward_components={"format": 0.5},
        )
        for i, reward in enumerate(rewards)
    )
    return Group(number, prompt, samples)


def batch_of(groups: list[Group]) -> TrainBatch:
    return TrainBatch.from_samples([sample for one in groups for sample in one.samples])
