"""The settings from which a rollout worker's process builds its GroupSampler."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from grpo_megatron.cluster.pool_worker import Place
from grpo_megatron.config.schema import Config
from grpo_megatron.data import PromptTokenizer
from grpo_megatron.rollout.episodes import make_episodes
from grpo_megatron.rollout.groups import GroupSampler
from grpo_megatron.sglang.client import EngineConnection


@dataclass(frozen=True)
class SamplerSpec:
    """All that a rollout worker needs to build its GroupSampler. Calling this object builds the sampler.

    The call is made in the worker's process. It also sets the environment variables in `secrets`, and starts
    the processes in `places`.
    """

    config: Config
    """Configuration of the run."""
    connections: Mapping[int, EngineConnection]
    """{index of an engine: its connection} for all engines. If an engine is lost, an engine of another node
    may finish its groups."""
    places: Mapping[str, Sequence[Place]]
    """{role: places} of the processes that the worker starts. The roles are "reward" and "environment"."""
    secrets: Mapping[str, str]
    """{environment variable: value} that reward functions and the servers of tools read."""
    tools: Sequence[dict[str, Any]]
    """JSON schemas of the tools that the environment offers, as the driver's prompts show them."""

    def __call__(self) -> GroupSampler:
        os.environ.update(self.secrets)
        config = self.config
        tokenizer = PromptTokenizer(config.model.path, config.data, self.tools)
        episodes = make_episodes(config, tokenizer, self.places.__getitem__, self.tools)
        return GroupSampler(self.connections, episodes, frozenset(tokenizer.turn_ends))
