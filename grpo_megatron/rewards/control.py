"""Control experiment with shuffled rewards: it tells whether the policy learns from the rewards at all."""

from dataclasses import replace

import numpy as np

from grpo_megatron.batch.sample import Group


def shuffle_rewards(groups: list[Group], rng: np.random.Generator) -> list[Group]:
    """Return the same samples with the rewards of all trajectories of a training step shuffled.

    This is a control experiment. The distribution of the rewards stays the same, but a reward no longer says
    which response is better. If the policy still improves, it learns from something other than the rewards.
    All sequences of a trajectory get the same reward. The reward components are removed.

    groups: all groups of the step.
    rng: source of the random order.
    """
    rewards = iter(rng.permutation([reward for group in groups for reward in group.rewards]).tolist())

    def dealt(group: Group) -> Group:
        samples = []
        for sequences in group.trajectories:
            reward = next(rewards)
            samples += [sample.scored(reward, {}) for sample in sequences]
        return replace(group, samples=tuple(samples))

    return [dealt(group) for group in groups]
