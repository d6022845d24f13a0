"""Facts that the planner needs about a reward model on the trainer's ranks."""

from dataclasses import dataclass, replace
from functools import cache

from grpo_megatron.config.derived import scores_on_ranks
from grpo_megatron.config.schema import Config, Precision, Recompute
from grpo_megatron.model.architecture import Architecture
from grpo_megatron.model.families import read_architecture


@dataclass(frozen=True)
class PlannedRewardModel:
    """A reward model that scores on the trainer's ranks.

    config: the run's configuration, with the precision, recomputation and pipeline stages that
        megatron.reward_model uses for the reward model.
    arch: architecture of the reward model.
    """

    config: Config
    arch: Architecture


def scorer(config: Config) -> PlannedRewardModel | None:
    """Return the reward model that the run has on the trainer's ranks; None if it has none.

    Raises UserError if the config.json in reward.model.path cannot be read.
    """
    if not scores_on_ranks(config):
        return None
    megatron = config.megatron
    precision = Precision.bf16 if megatron.precision == Precision.fp8 else megatron.precision
    megatron = replace(megatron, precision=precision, recompute=Recompute.none, pipeline_layers=[])
    return PlannedRewardModel(replace(config, megatron=megatron), _architecture(config.reward.model.path))


@cache
def _architecture(path: str) -> Architecture:
    """Return the architecture of the model in the folder `path`, which is read once per process.

    A layout search needs it for each of hundreds of candidates. Reading it each time took a quarter of the
    search.
    """
    return read_architecture(path)
