"""Helpers of tests of the reward `code`: sets of tests in every form, and the score of a program."""

import json

from grpo_megatron.config.reward import RewardConfig
from grpo_megatron.config.sandbox import CodeConfig, SandboxLimits
from grpo_megatron.rewards import resolve_reward

LIMITS = SandboxLimits(seconds=20)
SUMS = json.dumps({"inputs": ["1 2\n", "3 4\n", "5 6\n"], "outputs": ["3\n", "7\n", "11\n"]})
CALLS = json.dumps({"fn_name": "add", "inputs": [[1, 2], [3, 4]], "outputs": [3, [7]]})
ASSERTS = ["assert add(1, 2) == 3", "assert add(3, 4) == 7"]
# As HumanEval has them.
CHECK = "def check(candidate):\n    assert candidate(1, 2) == 3\n    assert candidate(3, 4) == 7\n"


def config(**options) -> RewardConfig:
    return RewardConfig(function="code", code=CodeConfig(limits=LIMITS, **options))


def score(program: str, answer, record=None, **options) -> dict[str, float]:
    reward = resolve_reward(config(**options))
    return reward(
        prompt="", response=f"Like this:\n```python\n{program}\n```\n", answer=answer, record=record or {}
    )
