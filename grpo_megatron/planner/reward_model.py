"""The planner's view of a reward model on the trainer's ranks."""

from dataclasses import dataclass, replace
from functools import cache

from grpo_megatron.config.schema import Config, Precision, Recompute
from grpo_megatron.megatron.spec import scores_on_ranks
from grpo_megatron.model.architecture import Architecture
from grpo_megatron.model.families import read_architecture


@dataclass(frozen=True)
class Scorer:
    """A reward model on the trainer's ranks.

    config: the run's, with the precision, recomputation and stages that megatron.reward_model uses.
    """

    config: Config
    arch: Architecture


def scorer(config: Config) -> Scorer | None:
    """Return the reward model on the ranks, or None if there is none.

    Raises UserError if the config.json in reward.model.path cannot be read.
    """
    if not scores_on_ranks(config):
        return None
    megatron = config.megatron
    precision = Precision.bf16 if megatron.precision == Precision.fp8 else megatron.precision
    megatron = replace(megatron, precision=precision, recompute=Recompute.none, pipeline_layers=[])
    return Scorer(replace(config, megatron=megatron), _architecture(config.reward.model.path))


@cache
def _architecture(path: str) -> Architecture:
    """Read an architecture once.

    A search asks for it with each of hundreds of candidates. Reading it each time took a quarter of the
    search.
    """
    return read_architecture(path)
