"""Filters: which groups, and which samples of them, are trained on.

A filter is a function (list of Group) -> list of Group, registered by `@group_filter("name")`. It returns the
groups to keep, in their order.
"""

from dataclasses import replace

import numpy as np

from grpo_megatron.batch.sample import Group
from grpo_megatron.config.algorithm import AlgorithmConfig
from grpo_megatron.errors import UserError
from grpo_megatron.plugins import Call, Registry

group_filter = Registry("filter", "algorithm.filters", call=Call(("groups",)))


@group_filter("nonzero_variance")
def nonzero_variance(groups: list[Group]) -> list[Group]:
    """Return the groups whose rewards differ (DAPO, arXiv:2503.14476 section 3.2).

    The other groups have no group-relative advantage.
    """
    return [group for group in groups if min(group.rewards) != max(group.rewards)]


def mask_truncated(groups: list[Group]) -> list[Group]:
    """Return the groups, without trained tokens in samples that were cut off at the length limit.

    This is DAPO's overlong filtering (section 3.4).
    """

    def masked(sample):
        if sample.finish_reason != "length":
            return sample
        return replace(sample, loss_mask=np.zeros_like(sample.loss_mask))

    return [replace(group, samples=tuple(masked(sample) for sample in group.samples)) for group in groups]


def apply_filters(groups: list[Group], options: AlgorithmConfig) -> list[Group]:
    """Apply algorithm.filters in their order, then algorithm.overlong_filter.

    Raises UserError if the filters leave nothing.
    """
    kept = filtered(groups, options.filters)
    if not kept:
        raise UserError(
            f"algorithm.filters={list(options.filters)} leave none of the step's {len(groups)} groups; "
            "rollout.dynamic_sampling.enabled=true samples further ones"
        )
    return mask_truncated(kept) if options.overlong_filter else kept


def filtered(groups: list[Group], names: list[str]) -> list[Group]:
    """Return the groups that remain after all filters."""
    for name in names:
        groups = group_filter.get(name)(groups) if groups else []
    return groups
