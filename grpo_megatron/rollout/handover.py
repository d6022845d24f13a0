"""Handover between trainer and engines: the newest weights one way, shared devices both ways."""

from functools import partial
from typing import Protocol

from grpo_megatron.monitoring.monitor import Monitor
from grpo_megatron.rollout.sharing import DeviceSharing, DeviceUse
from grpo_megatron.weights.sync.sync import WeightSync


class SleepingRanks(Protocol):
    """The trainer's ranks as Handover uses them. Implemented by trainer.ranks.RankGroup."""

    def sleep(self) -> dict[str, float]: ...


class Handover:
    """Prepares the engines for generation and the trainer's ranks for training.

    metrics: memory and weight-sync metrics of the last time each of them was measured
    """

    def __init__(
        self,
        weight_sync: WeightSync,
        ranks: SleepingRanks,
        monitor: Monitor,
        sharing: DeviceSharing | None = None,
        sleeps: bool = False,
    ):
        """Prepare handovers between engines that serve no weights yet and ranks that are awake.

        sharing: moves the devices that engines and ranks share; None: each side has its own devices.
        sleeps: True if ranks on devices of their own release their memory while engines generate.
        """
        self.weight_sync = weight_sync
        self._ranks, self._monitor, self._sharing, self._sleeps = ranks, monitor, sharing, sleeps
        self._memory: dict[str, float] = {}

    @property
    def metrics(self) -> dict[str, float]:
        return self._memory | self.weight_sync.metrics | (self._sharing.metrics if self._sharing else {})

    def publish(self, changed: bool = True) -> None:
        """Copy the trainer's weights into the engines, which tag every sample with the weights' version.

        changed: whether the weights differ from those published last; if so, they get a new version.

        If engines and ranks share devices, the engines have them afterwards.
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
        """Prepare for a time in which only the engines work.

        Engines on the ranks' devices get their memory back, and the weights published last are copied again.
        Engines on devices of their own need nothing.
        """
        if self._sharing:
            if self._sharing.state == DeviceUse.training:
                self.publish(changed=False)
        elif self._sleeps:
            with self._monitor.phases("sleep"):
                self._memory |= self._ranks.sleep()

    def to_ranks(self) -> None:
        """Have engines on the ranks' devices release their memory. Does nothing for other engines."""
        if self._sharing:
            self._sharing.to_ranks()
