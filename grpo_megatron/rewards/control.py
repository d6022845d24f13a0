"""A control experiment: does the learning come from the rewards?"""

from dataclasses import replace

import numpy as np

from grpo_megatron.batch.sample import Group


def shuffle_rewards(groups: list[Group], rng: np.random.Generator) -> list[Group]:
    """The same samples with the step's rewards dealt out at random among them.

    Distribution of rewards and size of updates stay, the information is gone: a policy that still
    improves learns from something else than the rewards.
    """
    rewards = rng.permutation([reward for group in groups for reward in group.rewards])
    dealt = iter(rewards.tolist())
    return [replace(group, samples=tuple(sample.scored(next(dealt), {}) for sample in group.samples)) for group in groups]
