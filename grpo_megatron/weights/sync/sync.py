"""WeightSync copies the trainer's current weights into the engines and counts their versions."""

import time

from grpo_megatron.weights.sync.interface import Probe, Transport, WeightSource, WeightTarget


class WeightSync:
    """The controller's handle for weight syncs.

    version: version of the weights that the engines serve; 0 before the first sync.
    metrics: metrics of the last sync.
    """

    def __init__(
        self,
        source: WeightSource,
        target: WeightTarget,
        transport: Transport,
        probe: Probe | None = None,
        probe_every: int = 0,
    ):
        """Connect a trainer (`source`) to the engines (`target`).

        probe: runs after the first sync and then after every `probe_every`-th one; 0 disables it.
        """
        self._source, self._target, self._transport = source, target, transport
        self._probe, self._probe_every, self._probing, self._syncs = probe, probe_every, False, 0
        self.version = 0
        self.metrics: dict[str, float] = {}

    def run(self, changed: bool = True) -> None:
        """Copy the trainer's current weights into the engines.

        Later samples carry the version of these weights.

        changed: whether the weights differ from those of the last sync; if so, the version increases by one.

        The caller calls `probe` once the engines serve.
        Raises if a rank or an engine fails, if an engine refuses a part, or if a digest differs. The run must
        then end.
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
        """Compare what the engines and the trainer compute, if a probe is due after this sync.

        Raises RuntimeError if they differ.
        """
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
