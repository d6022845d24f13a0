"""Helpers of tests of episodes against real environments: a model whose turns are given, and its alphabet."""

import asyncio

import numpy as np

from grpo_megatron.batch.prompt import Prompt
from grpo_megatron.batch.sample import WeightSpan
from grpo_megatron.config.reward import OnFailure, RewardConfig
from grpo_megatron.config.rollout import RolloutConfig
from grpo_megatron.rollout.environment_workers import Environments
from grpo_megatron.rollout.episodes import MultiTurn
from grpo_megatron.rollout.trajectory import Episode
from grpo_megatron.sglang.request import Completion
from tests.unit.toy_environments import decode, encode


def letters(text):
    """Return ids that a model may well choose, which never include the merged token."""
    return [ord(c) for c in text]


def joined(parts):
    return [token for part in parts for token in part]


class Letters:
    """The part of a PromptTokenizer that episodes need.

    A message is {u:...} or {a:...}; the model continues after {a:.
    """

    encode, decode = staticmethod(encode), staticmethod(decode)

    def chat(self, messages, where=""):
        return "".join(f"{{{message['role'][0]}:{message['content']}}}" for message in messages) + "{a:"

    def after_turn(self, messages):
        return encode("}" + self.chat(messages))


LETTERS = Letters()


def prompt(messages=None, **fields):
    text = LETTERS.chat(messages) if messages else "ask:"
    return Prompt(7, encode(text), text, "x", fields, messages=messages)


class Script:
    """A model that writes given turns one after the other, cut to the allowed length, and records its
    contexts.
    """

    def __init__(self, *turns, version=3):
        self.turns, self.version = list(turns), version
        self.asked, self.allowed = [], []

    async def __call__(self, ids, most, routed=0):
        self.asked.append(list(ids))
        self.allowed.append(most)
        text = self.turns.pop(0)
        new = letters(text)[:most]
        # The values tell turn and place, to be found again in the sample.
        logprobs = -np.arange(1, len(new) + 1, dtype=np.float32) - 100 * len(self.asked)
        reason = "stop" if len(new) == len(text) else "length"
        span = WeightSpan(self.version, 0, len(new))
        return Completion((0, 0), np.array(new, dtype=np.int32), logprobs, reason, (span,))


def of(name, places, timeout=30.0):
    """Return the environments of a class of tests.unit.toy_environments. The caller closes them."""
    rollout = RolloutConfig(environment=f"tests.unit.toy_environments:{name}")
    return Environments(rollout, RewardConfig(timeout=timeout), decode, places)


def play(environments, script, asked=None, limit=100, max_turns=8, state=(0, 0), seed=0, failure_value=None):
    episode = Episode(asked or prompt(), group_id=2, trajectory_id=5, limit=limit, state=state)
    reward = RewardConfig()
    if failure_value is not None:
        reward = RewardConfig(on_failure=OnFailure.value, failure_value=failure_value)
    turns = MultiTurn(environments, LETTERS, RolloutConfig(max_turns=max_turns), reward, seed)
    samples = asyncio.run(turns.play(episode, script))
    assert len(samples) == 1
    return samples[0]
