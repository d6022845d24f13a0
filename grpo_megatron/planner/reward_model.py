"""Facts that the planner needs about a reward model on the trainer's ranks."""

from dataclasses import dataclass
from functools import cache

from grpo_megatron.config.derived import scorer_config, scores_on_ranks
from grpo_megatron.config.schema import Config
from grpo_megatron.model.architecture import Architecture
from grpo_megatron.model.families import read_architecture

# A layout search needs the architecture for each of hundreds of candidates. Without the cache, reading
# config.json took a quarter of the search.
_architecture = cache(read_architecture)


@dataclass(frozen=True)
class PlannedRewardModel:
    """A reward model that scores on the trainer's ranks.

    config: the configuration with which the ranks build the reward model.
    arch: architecture of the reward model.
    """

    config: Config
    arch: Architecture


def scorer(config: Config) -> PlannedRewardModel | None:
    """Return the reward model that scores on the trainer's ranks; None if the run has none.

    Raises UserError if the config.json in reward.model.path cannot be read.
    """
    if not scores_on_ranks(config):
        return None
    return PlannedRewardModel(scorer_config(config), _architecture(config.reward.model.path))
