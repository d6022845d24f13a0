"""Rewards: numbers that say how good a response is.

A reward is a function ``reward(prompt, response, answer, record)``. It is called with keyword arguments:

- prompt, response: the texts.
- answer: the reference answer, or a list of accepted answers if the record has several.
- record: a dict of the other fields of the data record.

It returns a number, or a dict with the key "reward" and further numbers for the logs. It may be async. It may
have three more parameters:

- args: the options that the user configured for the reward.
- tokens: the length of the response in tokens.
- components: {name of a term: value} of the terms of the reward that are computed before.

A function registered by ``group_reward`` scores all responses to a prompt in one call. It gets the list
``responses`` instead of ``response``, and ``tokens`` and ``components`` are lists with one item per response.
It returns one number per response.

This package is light to import, because reward workers import only it when they start.
"""

from grpo_megatron.rewards.base import group_reward, resolve_reward, resolve_rewards, reward_function
from grpo_megatron.rewards.workers import RewardWorkers

__all__ = ["RewardWorkers", "group_reward", "resolve_reward", "resolve_rewards", "reward_function"]
