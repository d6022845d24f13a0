"""Filters choose the groups, and the samples within groups, that are trained on.

A filter is a function (list of Group) -> list of Group, registered by `@group_filter("name")`. The function
returns the groups to keep, in unchanged order.
"""

from dataclasses import dataclass, replace

import numpy as np

from grpo_megatron.batch.sample import Group
from grpo_megatron.config.algorithm import AlgorithmConfig
from grpo_megatron.errors import UserError
from grpo_megatron.plugins import Call, Registry

group_filter = Registry("filter", "algorithm.filters", call=Call(("groups",)))


@group_filter("nonzero_variance")
def nonzero_variance(groups: list[Group]) -> list[Group]:
    """Return the groups in which at least two rewards differ (DAPO, arXiv:2503.14476 section 3.2).

    A group whose rewards are all equal teaches nothing, because its group-relative advantages are zero.
    """
    return [group for group in groups if min(group.rewards) != max(group.rewards)]


def mask_truncated(groups: list[Group]) -> list[Group]:
    """Return copies of the groups in which samples that were cut off at the length limit are not trained on.

    These samples stay in their groups, but get num_trained=0, so that all their tokens are masked in the
    training batch. This is DAPO's overlong filtering (arXiv:2503.14476 section 3.4).
    """

    def masked(sample):
        if sample.finish_reason != "length":
            return sample
        return replace(sample, num_trained=0)

    return [replace(group, samples=tuple(masked(sample) for sample in group.samples)) for group in groups]


@dataclass(frozen=True)
class Filtered:
    """Result of applying filters to groups.

    groups: the groups that remain
    removed: for each filter, in order: (its name, int64 [n] ids of the trajectories that it removed)
    """

    groups: list[Group]
    removed: list[tuple[str, np.ndarray]]


def apply_filters(groups: list[Group], options: AlgorithmConfig) -> Filtered:
    """Return the groups to train on, after the configured filters, and what each filter has removed.

    First the filters that algorithm.filters names are applied, in order. Then, with
    algorithm.overlong_filter, samples that were cut off at the length limit are masked.

    Raises UserError if no group is left.
    """
    found = filtered(groups, options.filters)
    if not found.groups:
        raise UserError(
            f"algorithm.filters={list(options.filters)} removed all {len(groups)} groups of the step; set "
            "rollout.dynamic_sampling.enabled=true to sample more groups until enough are left"
        )
    return replace(found, groups=mask_truncated(found.groups)) if options.overlong_filter else found


def filtered(groups: list[Group], names: list[str]) -> Filtered:
    """Apply the filters called `names` in order. Return what remains, and what each filter has removed.

    Dynamic sampling calls this function with one group at a time, to find out whether the group is useful for
    training. After a filter has removed the last group, further filters are not called, and count as having
    removed nothing.
    """
    removed = []
    for name in names if groups else []:
        kept = group_filter.get(name)(groups) if groups else []
        removed.append((name, np.setdiff1d(_trajectory_ids(groups), _trajectory_ids(kept))))
        groups = kept
    return Filtered(groups, removed)


def _trajectory_ids(groups: list[Group]) -> np.ndarray:
    return np.array([sample.trajectory_id for group in groups for sample in group.samples], np.int64)
