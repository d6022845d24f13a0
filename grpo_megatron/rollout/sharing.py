"""Device sharing between engines and the trainer's ranks, which use the memory of the same devices in turns.

The memory moves from one side to the other in several transitions. The memory in use is measured after each.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from grpo_megatron.monitoring.monitor import Monitor
from grpo_megatron.sglang.pool import EnginePool

logger = logging.getLogger(__name__)

_GIB = 2**30


class SharingRanks(Protocol):
    """Interface of the trainer's ranks for DeviceSharing and Handover. RankGroup implements it."""

    def wake(self) -> None: ...

    def make_room(self) -> None: ...

    def sleep(self) -> dict[str, float]:
        """Free the GPU memory of the ranks.

        Returns {name of a metric: GiB}, the memory in use before and after; {} if nothing was freed.
        """

    def occupied(self) -> int: ...


class DeviceSharing:
    """Moves the memory of shared devices between engines and trainer ranks.

    The memory changes hands in small transitions. The monitor records each transition as a phase.

    Create this object when the engines have started, but the ranks have not. Call `release` before the ranks
    start, and `started` when they have. After that, `to_engines` and `to_ranks` are called in turns.

    ranks_have_devices: True from the moment when the ranks are awake until they sleep
    metrics: {name: GiB} of memory in use after each transition, for the engine and the rank that use most.
        The first values are also logged.
    """

    def __init__(self, engines: EnginePool, monitor: Monitor):
        self._engines, self._monitor = engines, monitor
        self._ranks: SharingRanks | None = None
        self.ranks_have_devices = False
        self.metrics: dict[str, float] = {}

    def release(self) -> None:
        """Have the engines release the memory of weights and KV cache, so that the ranks can use it."""
        with self._transition("release"):
            self._engines.release_memory()

    def started(self, ranks: SharingRanks) -> None:
        """Tell this object that the ranks have started and are awake. Call it once, after `release`.

        ranks: the trainer's ranks.
        """
        with self._transition("wake"):
            self._ranks = ranks
        self.ranks_have_devices = True

    def to_ranks(self) -> None:
        """Give the devices' memory to the ranks, for training, unless they have it already."""
        if self.ranks_have_devices:
            return
        self.release()
        with self._transition("wake"):
            self._ranks.wake()
        self.ranks_have_devices = True

    def to_engines(self, sync: Callable[[], None]) -> None:
        """Give the devices' memory to the engines, for generation, and fill it with the trainer's weights.

        The ranks must have the memory.

        sync: function that copies the trainer's weights into the engines.
        """
        # Weights are copied from memory to memory, so engines and ranks must hold weights at the same time,
        # but should hold little else. Therefore the ranks first free what training has left, such as FP8
        # copies of the weights, and the engines allocate their KV cache only when the ranks sleep.
        with self._transition("resume_weights"):
            self._ranks.make_room()
            self._engines.resume_weights()
        with self._transition("sync"):
            sync()
        with self._transition("sleep"):
            self.metrics |= self._ranks.sleep()
        self.ranks_have_devices = False
        with self._transition("resume_kv_cache"):
            self._engines.resume_kv_cache()

    @contextmanager
    def _transition(self, name: str) -> Iterator[None]:
        """Record the `with` block as a phase of the run, and then measure the memory in use.

        name: name of the phase, and part of the metrics' names.
        """
        with self._monitor.phases(name):
            yield
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
