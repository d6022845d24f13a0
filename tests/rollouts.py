"""A RolloutManager and a Recorder whose groups are sampled in the test's own process."""

from collections.abc import Iterable

from grpo_megatron.rollout.episodes import MultiTurn, SingleTurn
from grpo_megatron.rollout.groups import GroupSampler
from grpo_megatron.rollout.manager import RolloutManager
from grpo_megatron.rollout.recording.record import Recorder
from grpo_megatron.sglang.pool import EnginePool


def manager_of(
    engines: EnginePool, episodes: SingleTurn | MultiTurn, turn_ends: Iterable[int] = ()
) -> RolloutManager:
    """Return a manager of a run's engines, without rollout workers."""

    def connect(client_id: int):
        return {index: one.client(client_id) for index, one in enumerate(engines.connections())}

    sampler = GroupSampler(connect, episodes, frozenset(turn_ends))
    return RolloutManager(engines, [sampler] * len(engines.connections()))


def recorder_of(path, resumed: int = 0) -> Recorder:
    """Return a Recorder of groups that the test made itself. resumed: see Recorder."""
    sampler = GroupSampler(connect=dict, episodes=None, turn_ends=frozenset())
    return Recorder(str(path), RolloutManager(None, [sampler]), resumed)
