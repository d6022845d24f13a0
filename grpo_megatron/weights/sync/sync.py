"""WeightSync copies the trainer's current weights into the engines, and counts the weights' versions."""

import time

from grpo_megatron.weights.sync.interface import EnginesLost, Probe, WeightSource, WeightTarget
from grpo_megatron.weights.sync.resharding import Resharding


class WeightSync:
    """Copies the trainer's weights into the engines. The training loop calls `run` after each weight change.

    version: version of the weights that the engines serve; 0 before the first sync.
    metrics: {"sync/NAME": value} of the last sync; empty before the first sync.
    """

    def __init__(
        self,
        source: WeightSource,
        target: WeightTarget,
        resharding: Resharding,
        probe: Probe | None = None,
        probe_every: int = 0,
    ):
        """Connect a trainer (`source`) to the engines (`target`).

        resharding: transfers the weights from the trainer to the engines.
        probe: compares the log-probs of trainer and engines; None: no comparison.
        probe_every: compare after the first sync and then after every `probe_every`-th sync; 0: never.
        """
        self._source, self._target, self._resharding = source, target, resharding
        self._probe, self._probe_every, self._probing, self._syncs = probe, probe_every, False, 0
        self.version = 0
        self.metrics: dict[str, float] = {}

    @property
    def is_waited_for(self) -> bool:
        """True if no engine serves requests, and a restarted engine waits for weights before it can serve."""
        return self._target.waits_for_weights

    def run(self, changed: bool = True) -> None:
        """Copy the trainer's current weights into the engines, and set `version` and `metrics`.

        Afterwards the engines serve requests again, and their samples report `version`. The caller must
        call `probe`, which compares log-probs if this is due, as soon as the engines can answer requests. If
        engines die during the copy, the copy is repeated with the other engines and with engines that have
        been restarted meanwhile.

        changed: True if the weights differ from those of the last sync. The version then increases by one.

        Raises an error if a trainer rank fails, if an engine reports an error, if no engine is left, or if
        all engines have wrong weights after the copy. The engines cannot be used after such an error.
        """
        started = time.perf_counter()
        version = self.version + changed
        self._target.begin_update()
        while True:
            try:
                taken = self._resharding.transfer(self._source, self._target, version)
                break
            except EnginesLost:
                self._target.begin_update(again=True)
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
        """Compare the log-probs of engines and trainer, if this is due after the last sync (`probe_every`).

        Otherwise do nothing. The results are added to `metrics`. Raises RuntimeError if trainer and engines
        differ too much.
        """
        if self._probing:
            started = time.perf_counter()
            self.metrics |= {f"sync/{name}": value for name, value in self._probe.ask_engines().items()}
            self.metrics["sync/seconds"] += time.perf_counter() - started
            self._probing = False

    def close(self) -> None:
        self._resharding.close()

    def state_dict(self) -> dict:
        return {"version": self.version}

    def load_state_dict(self, state: dict) -> None:
        self.version = state["version"]
