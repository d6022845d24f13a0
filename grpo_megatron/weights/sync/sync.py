"""The trainer's current weights into the engines, under a new version each time."""

import time
from collections.abc import Callable

from grpo_megatron.weights.sync.interface import Transport, WeightSource, WeightTarget


class WeightSync:
    """Owned by the controller. version: of the weights the engines serve; 0 before the first sync. metrics: of the last one."""

    def __init__(
        self,
        source: WeightSource,
        target: WeightTarget,
        transport: Transport,
        probe: Callable[[], dict[str, float]] | None = None,
        probe_every: int = 0,
    ):
        """probe: called after the first sync and then every `probe_every`; raises if the engines compute something else."""
        self._source, self._target, self._transport = source, target, transport
        self._probe, self._probe_every, self._syncs = probe, probe_every, 0
        self.version = 0
        self.metrics: dict[str, float] = {}

    def run(self) -> None:
        """Bring the engines to the trainer's current weights; samples made from now on carry the new version.

        Raises if a rank or an engine fails, an engine refuses any part, or a digest differs; the run must then end.
        """
        started = time.perf_counter()
        self._target.begin_update()
        taken = self._transport.transfer(self._source, self._target, self.version + 1)
        self._target.end_update(self.version + 1)
        self.version += 1
        if self._probe and self._probe_every and self._syncs % self._probe_every == 0:
            taken |= self._probe()
        self._syncs += 1
        self.metrics = {f"sync/{name}": value for name, value in taken.items()}
        self.metrics["sync/seconds"] = time.perf_counter() - started

    def close(self) -> None:
        self._transport.close()

    def state_dict(self) -> dict:
        return {"version": self.version}

    def load_state_dict(self, state: dict) -> None:
        self.version = state["version"]
