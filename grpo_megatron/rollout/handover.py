"""Handover between trainer and engines: the newest weights, and the memory of devices that both use."""

from functools import partial
from typing import Protocol

from grpo_megatron.monitoring.monitor import Monitor
from grpo_megatron.rollout.sharing import DeviceSharing, DeviceUse
from grpo_megatron.weights.sync.sync import WeightSync


class SleepingRanks(Protocol):
    """The methods that put the trainer's ranks to sleep and wake them.

    Handover calls them to pass the GPUs between trainer and engines. Implemented by trainer.ranks.RankGroup.
    """

    def sleep(self) -> dict[str, float]: ...


class Handover:
    """Prepares the engines for generation, and the trainer's ranks for training.

    metrics: {name: value} of memory use and of weight syncs, each from its last measurement
    """

    def __init__(
        self,
        weight_sync: WeightSync,
        ranks: SleepingRanks,
        monitor: Monitor,
        sharing: DeviceSharing | None = None,
        sleeps: bool = False,
    ):
        """Store the parts. At this time, the engines have no weights yet, and the ranks are awake.

        sharing: moves the memory of devices that engines and ranks share. None if they share no devices.
        sleeps: True if ranks that share no devices with engines release their memory during generation.
        """
        self.weight_sync = weight_sync
        self._ranks, self._monitor, self._sharing, self._sleeps = ranks, monitor, sharing, sleeps
        self._memory: dict[str, float] = {}

    @property
    def metrics(self) -> dict[str, float]:
        return self._memory | self.weight_sync.metrics | (self._sharing.metrics if self._sharing else {})

    def publish(self, changed: bool = True) -> None:
        """Copy the trainer's weights into the engines, which tag every sample with the weights' version.

        If engines and ranks share devices, the engines have the devices' memory afterwards.

        changed: whether the weights differ from those published last. If so, the version increases by one.
        """
        sync = partial(self.weight_sync.run, changed)
        if self._sharing:
            self._sharing.to_engines(sync)
        else:
            with self._monitor.phases("sync"):
                sync()
        with self._monitor.phases("probe"):
            self.weight_sync.probe()

    def to_engines(self) -> None:
        """Prepare for generation, during which the ranks do not work.

        If engines and ranks share devices, the engines get the devices' memory back if the ranks have it. The
        weights published last are then copied into the engines again. If they share no devices, the ranks
        release their memory if `sleeps` is set.
        """
        if self._sharing:
            if self._sharing.state == DeviceUse.training:
                self.publish(changed=False)
        elif self._sleeps:
            with self._monitor.phases("sleep"):
                self._memory |= self._ranks.sleep()

    def to_ranks(self) -> None:
        """Prepare for training: if engines and ranks share devices, give the devices' memory to the ranks."""
        if self._sharing:
            self._sharing.to_ranks()
