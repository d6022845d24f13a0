"""Accuracy on held-out prompts."""

from dataclasses import replace

import numpy as np

from grpo_megatron.batch import Prompt
from grpo_megatron.rollout.source import EngineRollouts, training_sampling


class Evaluation:
    """Samples every held-out prompt and averages the reward."""

    def __init__(self, prompts: list[Prompt], config):
        """config: config.schema.Config."""
        self.prompts = prompts
        sampling = training_sampling(config.rollout)
        self._sampled = replace(sampling, n=config.eval.n, temperature=config.eval.temperature)
        self._greedy = replace(sampling, n=1, temperature=0.0) if config.eval.greedy else None

    def run(self, rollouts: EngineRollouts) -> dict[str, float]:
        """{"eval/mean@n": mean reward of n samples per prompt, "eval/greedy": of greedy decoding}."""
        scalars = {f"eval/mean@{self._sampled.n}": self._mean_reward(rollouts, self._sampled)}
        if self._greedy:
            scalars["eval/greedy"] = self._mean_reward(rollouts, self._greedy)
        return scalars

    def _mean_reward(self, rollouts: EngineRollouts, sampling) -> float:
        groups = rollouts.manager.generate(self.prompts, sampling)
        return float(np.mean([reward for group in groups for reward in group.rewards]))
