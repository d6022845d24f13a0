"""Changes of rewards that apply to training, not to evaluations: by length of the response, or shuffled."""

from dataclasses import replace

import numpy as np

from grpo_megatron.batch.sample import Group
from grpo_megatron.config.schema import Config
from grpo_megatron.rewards.control import shuffle_rewards


def shape_rewards(groups: list[Group], config: Config, step: int) -> list[Group]:
    """Return the groups with the rewards to train on, which may differ from the rewards in evaluations.

    The penalty for long responses (reward.overlong_buffer) is added to the rewards. If reward.shuffle_control
    is set, the rewards are then shuffled among all trajectories, as a control experiment.

    step: index of the training step, from 1. It seeds the shuffling.
    """
    groups = shape_overlong(groups, config.rollout.max_response_length, config.reward.overlong_buffer)
    if config.reward.shuffle_control:
        groups = shuffle_rewards(groups, np.random.default_rng([config.run.seed, step]))
    return groups


def overlong_penalty(length: int, longest: int, buffer: int, penalty: float) -> float:
    """Return DAPO's penalty for a long response (soft overlong punishment, arXiv:2503.14476 eq. 13).

    The result is 0 for lengths up to longest - buffer. From there it falls linearly to -penalty at `longest`,
    and stays at -penalty for greater lengths.

    length: length of the response in tokens.
    longest: maximum length of a response in tokens.
    buffer: number of tokens below `longest` in which the penalty grows, at least 1.
    penalty: the largest penalty, as a positive number.
    """
    return penalty * min(0.0, max(-1.0, (longest - buffer - length) / buffer))


def shape_overlong(groups: list[Group], longest: int, config) -> list[Group]:
    """Return the groups with the penalty for long responses added to each trajectory's reward.

    The penalty is 0 or negative, as returned by `overlong_penalty`. It is also stored as the reward component
    `overlong_penalty`. The length is the number of tokens after the prompt. If a trajectory has several
    sequences, the length of its longest sequence counts.

    longest: rollout.max_response_length, in tokens.
    config: section `reward.overlong_buffer`. If its `length` is 0, the groups are returned unchanged.
    """
    if not config.length:
        return groups

    def shaped(group: Group) -> Group:
        samples, asked = [], len(group.prompt.ids)
        for sequences in group.trajectories:
            length = max(sample.num_tokens for sample in sequences) - asked
            penalty = overlong_penalty(length, longest, config.length, config.penalty)
            samples += [
                s.scored(s.reward + penalty, s.reward_components | {"overlong_penalty": penalty})
                for s in sequences
            ]
        return replace(group, samples=tuple(samples))

    return [shaped(group) for group in groups]
