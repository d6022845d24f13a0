"""Device sharing between engines and the trainer's ranks, which use the memory of the same devices in turns.

A fixed ring of transitions moves the memory from one side to the other and back. The memory in use is
measured after each transition.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from typing import NamedTuple, Protocol

from grpo_megatron.monitoring.monitor import Monitor

logger = logging.getLogger(__name__)

_GIB = 2**30


class DeviceUse(Enum):
    """States of devices that engines and ranks share. A value says what the two have in device memory."""

    serving = "engines serve, ranks sleep"
    vacant = "engines have given back weights and KV cache, ranks sleep"
    training = "ranks are awake, engines have given back weights and KV cache"
    filling = "ranks are awake, engines have room for weights, but no KV cache"
    filled = "ranks are awake, engines have the newest weights, but no KV cache"
    leaving = "ranks sleep, engines have the newest weights, but no KV cache"


class Transition(NamedTuple):
    """A change of the shared devices' state from `before` to `after`, allowed only in the state `before`."""

    name: str
    before: DeviceUse
    after: DeviceUse


# The transitions form one ring. Weights are copied from memory to memory, so engines and ranks must hold
# weights at the same time, but should hold little else. Therefore the KV cache is released before the ranks
# wake, and is allocated again when they sleep.
RING = (
    Transition("release", DeviceUse.serving, DeviceUse.vacant),
    Transition("wake", DeviceUse.vacant, DeviceUse.training),
    Transition("resume_weights", DeviceUse.training, DeviceUse.filling),
    Transition("sync", DeviceUse.filling, DeviceUse.filled),
    Transition("sleep", DeviceUse.filled, DeviceUse.leaving),
    Transition("resume_kv_cache", DeviceUse.leaving, DeviceUse.serving),
)
_BY_NAME = {transition.name: transition for transition in RING}


class SharingEngines(Protocol):
    """Interface of the rollout engines, as far as DeviceSharing uses it. EnginePool implements it."""

    def release_memory(self) -> None: ...

    def resume_weights(self) -> None: ...

    def resume_kv_cache(self) -> None: ...

    def occupied(self) -> int: ...


class SharingRanks(Protocol):
    """Interface of the trainer's ranks, as far as DeviceSharing uses it. RankGroup implements it."""

    def wake(self) -> None: ...

    def make_room(self) -> None: ...

    def sleep(self) -> dict[str, float]: ...

    def occupied(self) -> int: ...


class DeviceSharing:
    """Moves the memory of shared devices between engines and trainer ranks.

    The memory goes round in a fixed ring of transitions: release, wake, resume_weights, sync, sleep,
    resume_kv_cache. Each public method performs one transition, except to_ranks and to_engines, which perform
    several. A method raises RuntimeError if its transition is not the next one. The monitor records each
    transition as a phase.

    Create this object when the engines have started, but the ranks have not.

    state: the current state of the devices
    metrics: {name: GiB} of memory in use after each transition, for the engine and the rank that use most.
        The first values are also logged.
    """

    def __init__(self, engines: SharingEngines, monitor: Monitor):
        self._engines, self._monitor = engines, monitor
        self._ranks: SharingRanks | None = None
        self.state = DeviceUse.serving
        self.metrics: dict[str, float] = {}

    def release(self) -> None:
        """Have the engines release the memory of weights and KV cache, so that the ranks can use it."""
        with self._transition("release"):
            self._engines.release_memory()

    def started(self, ranks: SharingRanks) -> None:
        """Tell this object that the ranks have started and are awake. Call it in place of the first `wake`.

        ranks: the trainer's ranks.
        """
        with self._transition("wake"):
            self._ranks = ranks

    def wake(self) -> None:
        with self._transition("wake"):
            self._ranks.wake()

    def resume_weights(self) -> None:
        """Have the engines allocate memory for their weights again. The contents follow with `sync`.

        Before this, the ranks free what training has left in memory, such as FP8 copies of the weights.
        """
        with self._transition("resume_weights"):
            # The devices' memory is fullest here. Before the engines allocate their weights, the ranks
            # release what training has left, such as FP8 copies of the weights.
            self._ranks.make_room()
            self._engines.resume_weights()

    def sync(self, run: Callable[[], None]) -> None:
        """Copy the trainer's weights into the engines. This is the transition `sync` of the shared devices.

        run: function that copies the weights.
        """
        with self._transition("sync"):
            run()

    def sleep(self) -> None:
        with self._transition("sleep"):
            self.metrics |= self._ranks.sleep()

    def resume_kv_cache(self) -> None:
        """Have the engines allocate an empty KV cache, so that the engines can serve requests again."""
        with self._transition("resume_kv_cache"):
            self._engines.resume_kv_cache()

    def to_ranks(self) -> None:
        """Give the devices' memory to the ranks, for training, unless they have it already."""
        if self.state != DeviceUse.training:
            self.release()
            self.wake()

    def to_engines(self, sync: Callable[[], None]) -> None:
        """Give the devices' memory to the engines, for generation, and fill it with the trainer's weights.

        sync: function that copies the trainer's weights into the engines.
        """
        self.resume_weights()
        self.sync(sync)
        self.sleep()
        self.resume_kv_cache()

    @contextmanager
    def _transition(self, name: str) -> Iterator[None]:
        wanted = _BY_NAME[name]
        if self.state != wanted.before:
            follows = next(transition.name for transition in RING if transition.before == self.state)
            raise RuntimeError(f"`{name}` is out of order: {self.state.value}, and `{follows}` is next")
        with self._monitor.phases(name):
            yield
        self.state = wanted.after
        self._measure(name)

    def _measure(self, name: str) -> None:
        engine, rank = self._engines.occupied() / _GIB, self._ranks.occupied() / _GIB if self._ranks else 0.0
        found = {f"memory/after_{name}/engine_gib": engine, f"memory/after_{name}/rank_gib": rank}
        if not self.metrics.keys() >= found.keys():
            logger.info(
                f"memory after {name}: {engine:.3f} GiB in the fullest engine, {rank:.3f} GiB in the fullest "
                "rank"
            )
        self.metrics |= found
