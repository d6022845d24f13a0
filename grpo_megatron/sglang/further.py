"""FurtherEngines: reserves devices for engines that a run gets after its start."""

import logging
import threading
from collections.abc import Callable

from grpo_megatron.cluster.placement import Cluster, Slot
from grpo_megatron.errors import ProcessLost

logger = logging.getLogger(__name__)

# Seconds between two looks at whether Ray has reserved the devices of the next engine.
_LOOK_SECONDS = 2.0


class FurtherEngines:
    """Asks Ray for the devices of one more engine at a time, until the run has as many as it may have.

    Ray reserves devices that are free: those that no run uses, and those of nodes that join the cluster.
    """

    def __init__(self, cluster: Cluster, most: int, add: Callable[[list[Slot]], bool]):
        """Start to ask, in a thread.

        most: number of further engines.
        add: adds an engine with these slots to the run. It returns False if that is not possible now.
        """
        self._cluster, self._most, self._add = cluster, most, add
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="further engines", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        for _ in range(self._most):
            if not self._add_one():
                return

    def _add_one(self) -> bool:
        """Add an engine as soon as there are devices for it. Return False if `close` comes first."""
        asked = self._cluster.request_engine()
        while not self._closed.wait(_LOOK_SECONDS):
            try:
                slots = asked.slots()
            except ProcessLost as error:
                logger.warning(f"a node that joined has left before an engine was started there: {error}")
                asked.release()
                asked = self._cluster.request_engine()
                continue
            if slots and self._add(slots):
                return True
        return False

    def close(self) -> None:
        self._closed.set()
        self._thread.join()
