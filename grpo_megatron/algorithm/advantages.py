"""Advantages: how much better a sample is than what the policy does on average."""

import torch


def group_advantages(
    rewards: torch.Tensor, group_ids: torch.Tensor, norm_by_std: bool = True, eps: float = 1e-6
) -> torch.Tensor:
    """GRPO's group-relative advantage, one number per sample; float64 [S].

    rewards [S]; group_ids int64 [S], groups may be of any size and in any order. With norm_by_std
    (r - mean) / (std + eps), std over n-1 (GRPO, arXiv:2402.03300 eq. 21); without, r - mean
    (Dr.GRPO, arXiv:2503.20783). A group of one, and a group of equal rewards whatever their value,
    give exactly zero: the rounding error of the mean, divided by eps, would look like a signal.
    """
    rewards = rewards.to(torch.float64)
    _, group = torch.unique(group_ids, return_inverse=True)
    num_groups = int(group.max()) + 1 if group.numel() else 0
    count = torch.zeros(num_groups, dtype=torch.float64).index_add(0, group, torch.ones_like(rewards))
    mean = torch.zeros(num_groups, dtype=torch.float64).index_add(0, group, rewards) / count
    centred = rewards - mean[group]
    low = torch.full((num_groups,), torch.inf, dtype=torch.float64).scatter_reduce(0, group, rewards, "amin")
    high = torch.full((num_groups,), -torch.inf, dtype=torch.float64).scatter_reduce(0, group, rewards, "amax")
    centred = torch.where((low == high)[group], 0.0, centred)
    if norm_by_std:
        squares = torch.zeros(num_groups, dtype=torch.float64).index_add(0, group, centred.square())
        std = (squares / (count - 1).clamp(min=1)).sqrt()
        centred = centred / (std + eps)[group]
    return centred
