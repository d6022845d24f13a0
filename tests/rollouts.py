"""A RolloutManager and a Recorder whose groups are sampled in the test's own process, and the base of its
fake engines.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path

from grpo_megatron.cluster.rounds import RoundId
from grpo_megatron.errors import ProcessLost
from grpo_megatron.rollout.episodes import MultiTurn, SingleTurn
from grpo_megatron.rollout.groups import GroupSampler
from grpo_megatron.rollout.manager import RolloutManager
from grpo_megatron.rollout.recording.arrays import RecordedHandles, write_samples
from grpo_megatron.rollout.recording.record import Recorder
from grpo_megatron.sglang.admission import Admission, Closed
from grpo_megatron.sglang.kv_pressure import RequestLimit
from grpo_megatron.sglang.pool import EnginePool


class FakeEngines:
    """Fake engines, without their answers. A subclass defines `generate`, of all clients.

    size: number of engines
    serving: {index: 0} of those that are not lost
    ended: the round of each client that has ended
    """

    weight_version, end_ids, size = 0, frozenset(), 1

    def __init__(self):
        self.admission, self.ended, self.serving = Admission(), [], dict.fromkeys(range(self.size), 0)
        self.admission.open(Closed.unsynced)

    def lost(self, index: int, starts: int, error: ProcessLost) -> None:
        self.serving.pop(index, None)
        if not self.serving:
            raise error

    def connections(self):
        return [self] * self.size

    def client(self, round: RoundId, limit: int | None = None):
        return _FakeClient(self, round)


class _FakeClient:
    def __init__(self, engines: FakeEngines, round: RoundId):
        self._engines, self._round = engines, round
        self.generate = engines.generate
        self.limit = RequestLimit(256)

    async def end(self) -> None:
        self._engines.ended.append(self._round)


class LocalSampler(GroupSampler):
    """A sampler in the test's own process, which also does what a rollout worker does beside the sampling."""

    async def write_samples(self, path: Path, handles: Sequence[RecordedHandles]) -> OSError | None:
        return write_samples(path, handles)


def manager_of(
    engines: EnginePool | FakeEngines, episodes: SingleTurn | MultiTurn, turn_ends: Iterable[int] = ()
) -> RolloutManager:
    """Return a manager of a run's engines, without rollout workers."""

    connections = engines.connections()
    sampler = LocalSampler(dict(enumerate(connections)), episodes, frozenset(turn_ends))
    return RolloutManager(engines, [sampler] * len(connections))


def recorder_of(path, resumed: int = 0) -> Recorder:
    """Return a Recorder of groups that the test made itself. resumed: see Recorder."""
    sampler = LocalSampler(connections={}, episodes=None, turn_ends=frozenset())
    return Recorder(str(path), RolloutManager(None, [sampler]), resumed)
