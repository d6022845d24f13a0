"""Handover between trainer and engines: the newest weights, and the memory of devices that both use."""

from functools import partial

from grpo_megatron.monitoring.monitor import Monitor
from grpo_megatron.rollout.sharing import DeviceSharing, SharingRanks
from grpo_megatron.weights.sync.sync import WeightSync


class Handover:
    """Prepares the change between generation and training.

    The engines get the trainer's weights. If engines and trainer ranks share devices, the devices' memory
    changes hands.

    metrics: {name: value} of memory use and of weight syncs, each from the last measurement
    """

    def __init__(
        self,
        weight_sync: WeightSync,
        ranks: SharingRanks,
        monitor: Monitor,
        sharing: DeviceSharing | None = None,
        sleeps: bool = False,
    ):
        """Create the handover between trainer and engines. The ranks must be awake.

        The engines need not have the trainer's weights yet. `publish` copies them.

        weight_sync: copies the trainer's weights into the engines.
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
        """Copy the trainer's weights into the engines.

        If engines and ranks share devices, the ranks get the devices' memory before the copy, unless the
        ranks have it already. After the copy, the engines have the memory.

        If weight_sync.probe_every requires it after this copy, the log-probs of engines and trainer are then
        compared. Raises the errors of WeightSync.run and WeightSync.probe.

        changed: True if the weights differ from those published last. The version of the weights, with which
            engines tag every sample, then increases by one.
        """
        sync = partial(self.weight_sync.run, changed)
        if self._sharing:
            self._sharing.to_ranks()
            self._sharing.to_engines(sync)
        else:
            with self._monitor.phases("sync"):
                sync()
        with self._monitor.phases("probe"):
            self.weight_sync.probe()

    def to_engines(self) -> None:
        """Prepare the engines for generation.

        If engines and ranks share devices and the ranks have the devices' memory, the memory goes back to the
        engines, and the trainer's weights are copied into the engines again, without a new version. If
        engines and ranks share no devices, the ranks release their own memory, provided that the constructor
        got sleeps=True.
        """
        if self._sharing:
            if self._sharing.ranks_have_devices:
                self.publish(changed=False)
        elif self._sleeps:
            with self._monitor.phases("sleep"):
                self._memory |= self._ranks.sleep()

    def to_ranks(self) -> None:
        """Prepare for training: if engines and ranks share devices, give the devices' memory to the ranks."""
        if self._sharing:
            self._sharing.to_ranks()
