"""The trainer's current weights into the engines, under a new version where they changed."""

import time

from grpo_megatron.weights.sync.interface import Probe, Transport, WeightSource, WeightTarget


class WeightSync:
    """Owned by the controller. version: of the weights the engines serve; 0 before the first sync. metrics: of the last one."""

    def __init__(
        self,
        source: WeightSource,
        target: WeightTarget,
        transport: Transport,
        probe: Probe | None = None,
        probe_every: int = 0,
    ):
        """probe: asked after the first sync and then every `probe_every`."""
        self._source, self._target, self._transport = source, target, transport
        self._probe, self._probe_every, self._probing, self._syncs = probe, probe_every, False, 0
        self.version = 0
        self.metrics: dict[str, float] = {}

    def run(self, changed: bool = True) -> None:
        """Bring the engines to the trainer's current weights; samples made from now on carry their version.

        changed: to a new one, otherwise as since the last sync. `probe` follows once the engines serve. Raises if a rank or an
        engine fails, an engine refuses any part, or a digest differs; the run must then end.
        """
        started = time.perf_counter()
        version = self.version + changed
        self._target.begin_update()
        taken = self._transport.transfer(self._source, self._target, version)
        self._target.end_update(version)
        self.version = version
        self._probing = (
            self._probe is not None and self._probe_every > 0 and self._syncs % self._probe_every == 0
        )
        if self._probing:
            self._probe.ask_trainer()
        self._syncs += 1
        self.metrics = {f"sync/{name}": value for name, value in taken.items()}
        self.metrics["sync/seconds"] = time.perf_counter() - started

    def probe(self) -> None:
        """After a sync: do the engines compute what the trainer does, if that is to be asked? Raises RuntimeError if not."""
        if self._probing:
            started = time.perf_counter()
            self.metrics |= {f"sync/{name}": value for name, value in self._probe.ask_engines().items()}
            self.metrics["sync/seconds"] += time.perf_counter() - started
            self._probing = False

    def close(self) -> None:
        self._transport.close()

    def state_dict(self) -> dict:
        return {"version": self.version}

    def load_state_dict(self, state: dict) -> None:
        self.version = state["version"]
