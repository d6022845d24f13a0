"""Shared by the integration tests; `digits` runs in reward processes."""


def digits(prompt, response, answer, record):
    """A reward that untrained models get different values of: the share of digits."""
    return sum(c.isdigit() for c in response) / max(1, len(response))


def nan_reward(prompt, response, answer, record):
    return float("nan")
