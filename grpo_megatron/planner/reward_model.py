"""A reward model on the trainer's ranks, as the planner sees it."""

from dataclasses import dataclass, replace
from functools import cache

from grpo_megatron.config.schema import Config, Precision, Recompute
from grpo_megatron.megatron.spec import scores_on_ranks
from grpo_megatron.model.architecture import Architecture
from grpo_megatron.model.families import read_architecture


@dataclass(frozen=True)
class Scorer:
    """config: the run's, with what megatron.reward_model has in place of the policy's precision, recomputation and uneven stages."""

    config: Config
    arch: Architecture


def scorer(config: Config) -> Scorer | None:
    """None: the ranks have no reward model. Raises UserError for a config.json in reward.model.path that cannot be read."""
    if not scores_on_ranks(config):
        return None
    megatron = config.megatron
    precision = Precision.bf16 if megatron.precision == Precision.fp8 else megatron.precision
    megatron = replace(megatron, precision=precision, recompute=Recompute.none, pipeline_layers=[])
    return Scorer(replace(config, megatron=megatron), _architecture(config.reward.model.path))


@cache
def _architecture(path: str) -> Architecture:
    """Read once, because a search asks for it again with every candidate: hundreds of times, a quarter of its time."""
    return read_architecture(path)
