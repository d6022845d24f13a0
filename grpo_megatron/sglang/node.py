"""A node of an SGLang engine: its child processes, and the Ray actor that holds those of the further nodes of an engine over several."""

import asyncio
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import ray

from grpo_megatron.cluster.processes import Process, redirect_output
from grpo_megatron.sglang.start import start_engine

# Of SGLang's files in memory that are shared by its processes. 24 MiB for each group of ranks, and some KiB for each engine.
_SHARED = "/dev/shm/sgl"


class Children:
    """SGLang's processes on this node, as they are now."""

    def __init__(self) -> None:
        # Python's own helpers are children too, which come and go.
        self._processes = []
        for child in psutil.Process().children(recursive=True):
            with suppress(psutil.Error):  # it has ended
                if "sglang::" in " ".join(child.cmdline()):
                    self._processes.append(child)

    @property
    def pids(self) -> list[int]:
        return [child.pid for child in self._processes]

    def states(self) -> list[str]:
        """One for each, such as `sglang::scheduler (pid 7) stopped`."""
        found = []
        for child in self._processes:
            with suppress(psutil.NoSuchProcess):
                found.append(f"{child.cmdline()[0].split('_TP')[0]} (pid {child.pid}) {child.status()}")
        return found

    def unlink_shared_files(self) -> None:
        """Once all of them have opened what they share. SGLang ends them by SIGKILL, after which the files would fill /dev/shm for ever."""
        for pid in self.pids:
            with suppress(OSError):  # it has just died, which others notice
                mapped = Path(f"/proc/{pid}/maps").read_text().split()
                for path in {word for word in mapped if word.startswith(_SHARED)}:
                    Path(path).unlink(missing_ok=True)

    @property
    def alive(self) -> bool:
        return all(child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in self._processes)


@ray.remote
class EngineNode:
    """Serves nothing: its schedulers follow those of the engine's first node."""

    def __init__(self, process: Process, arguments: dict[str, Any]):
        redirect_output(process.log)
        self._engine = start_engine(arguments)
        self._children = Children()
        self._children.unlink_shared_files()

    async def ready(self) -> int:
        """Returns the process id once the node is up."""
        return os.getpid()

    async def end(self) -> None:
        """Returns as soon as a child of SGLang's is gone."""
        while self._children.alive:
            await asyncio.sleep(1.0)

    async def shutdown(self) -> None:
        self._engine.shutdown()
