"""The time limit of an episode (rollout.episode_timeout)."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from grpo_megatron.rollout.environments import EnvironmentFailed

T = TypeVar("T")


class EpisodeTooLong(EnvironmentFailed):
    """An episode took longer than rollout.episode_timeout."""


async def in_time(played: Coroutine[Any, Any, T], seconds: float | None, uid: int) -> T:
    """Wait for the result of an episode, and return it.

    played: coroutine that plays the episode.
    seconds: rollout.episode_timeout; None: no limit.
    uid: index of the prompt's record, for the error message.

    Raises EpisodeTooLong if the episode takes longer than that.
    """
    limit = asyncio.timeout(seconds)
    try:
        async with limit:
            return await played
    except TimeoutError as error:
        if not limit.expired():
            raise
        raise EpisodeTooLong(
            f"an episode of record {uid} took longer than rollout.episode_timeout={seconds:g} s"
        ) from error
