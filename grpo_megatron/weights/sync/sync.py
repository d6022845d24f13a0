"""The trainer's current weights into the engines, under a new version each time."""

from grpo_megatron.weights.sync.interface import Transport, WeightSource, WeightTarget
from grpo_megatron.weights.sync.plan import Plan


class WeightSync:
    """Owned by the controller. version: of the weights the engines serve; 0 before the first sync."""

    def __init__(self, source: WeightSource, target: WeightTarget, transport: Transport, plan: Plan):
        self._source, self._target, self._transport, self._plan = source, target, transport, plan
        self.version = 0

    def run(self) -> None:
        """Bring the engines to the trainer's current weights; samples made from now on carry the new version.

        Raises if a rank or an engine fails, an engine refuses any part, or a tensor did not arrive; the run must then end.
        """
        self._target.begin_update()
        self._plan.check(self._transport.transfer(self._source, self._target))
        self._target.end_update(self.version + 1)
        self.version += 1

    def state_dict(self) -> dict:
        return {"version": self.version}

    def load_state_dict(self, state: dict) -> None:
        self.version = state["version"]
