"""FurtherEngines: reserves devices for engines that a run gets after its start."""

import logging
import threading
from collections.abc import Callable

from grpo_megatron.cluster.placement import Cluster, RequestedEngine, Slot
from grpo_megatron.errors import UserError

logger = logging.getLogger(__name__)

# Seconds between two looks at whether Ray has reserved the devices of the next engine.
_LOOK_SECONDS = 2.0
# Longest time to wait for the thread at the end of the run. It may be waiting for a node that has left.
_END_SECONDS = 5.0


class FurtherEngines:
    """Adds engines during the run: asks Ray for the devices of one more engine at a time, in a thread.

    Ray reserves devices as soon as they are free, for example when another run ends or a node joins the
    cluster. The thread goes on until the run has rollout.engine.max_engines engines.
    """

    def __init__(self, cluster: Cluster, most: int, add: Callable[[list[Slot], RequestedEngine], bool]):
        """Start a thread that asks Ray for devices and adds the engines.

        most: maximum number of engines to add.
        add: function that starts an engine on the given slots and reservation. It returns True, or False if
            no engine may be started now; the thread then tries again later.
        """
        self._cluster, self._add = cluster, add
        self._closed, self._missing = threading.Event(), threading.Semaphore(most)
        self._thread = threading.Thread(target=self._run, name="further engines", daemon=True)
        self._thread.start()

    def replace_one(self) -> None:
        """Ask for the devices of one more engine, in place of an engine that is not started again."""
        self._missing.release()

    def _run(self) -> None:
        while self._missing.acquire() and not self._closed.is_set():
            try:
                self._add_one()
            except UserError as error:
                logger.warning(f"a node left the cluster before an engine was started on it: {error}")
                self._missing.release()
                self._closed.wait(_LOOK_SECONDS)

    def _add_one(self) -> None:
        """Add an engine as soon as there are devices for it. Return without an engine if `close` comes first.

        Raises UserError if a node of the devices has left. The devices are then released.
        """
        requested = self._cluster.request_engine()
        try:
            while not self._closed.wait(_LOOK_SECONDS):
                slots = requested.slots()
                if slots and self._add(slots, requested):
                    return
        except BaseException:
            requested.release()
            raise

    def close(self) -> None:
        self._closed.set()
        self._missing.release()
        self._thread.join(_END_SECONDS)
